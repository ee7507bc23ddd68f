"""What a kill, a flipped bit and a lost file do to checkpoints of torch's DCP, of DeepSpeed and of Onefold.

    python -m benchmarks.peer_checkpoints [--systems onefold dcp deepspeed] [--kills 30] [--flips 500]

Two gloo ranks train a small model with AdamW and save after every step, each library as its documentation says:

    onefold    `onefold.save(folder, …)`, resumed by `onefold.load(folder, …)`
    dcp        FSDP2, `dcp.save(get_state_dict(…), checkpoint_id=folder/step-N)`, resumed from the newest folder that
               has a `.metadata`, as torchtitan does
    deepspeed  ZeRO stage 2, `engine.save_checkpoint(folder)`, resumed by `engine.load_checkpoint(folder)`

or saves each time to the same place: DCP's tutorial has one fixed folder, DeepSpeed has `tag="last"`, Onefold has one
step number and `overwrite=True`. Before each save every rank writes down digests of its tensors, elsewhere; what a
restart loads is compared with these: values are those of one step, of several steps, or of none.

Results go to docs/results/soak-peers.json, in which new ones replace old ones of the same system and kind;
`python -m tools.soak_table` makes the table of docs/results/soak.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_savers import RANKS, SYSTEMS, WIDTH, System
from benchmarks.results import versions
from tests.harness.soak import machine

KINDS = ("kills, a new folder each time", "kills, over the last one", "bit flips", "files missing or cut")
LIMIT_S = 300.0  # whoever has not answered by then hangs; a start on a busy machine takes long
GRACE_S = 5.0  # from SIGTERM to SIGKILL for ranks that outlive the one that was struck
OUT = Path(__file__).parents[1] / "docs/results/soak-peers.json"


# -- a rank, in a process of its own -----------------------------------------------------------------------------------


def digests(system: System) -> list[str]:
    return [hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest()[:16] for t in system.tensors()]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def run_rank(name: str, rank: int, place: Path, same: bool, asked: Connection) -> None:
    """Answers ("load",) by what was found, and after ("train", step) steps and saves for ever."""
    quiet(place / f"rank-{rank}.log")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=RANKS)
    system: System = SYSTEMS[name]()
    system.step(batch(0))  # optimizer state is there from now on
    asked.send("ready")
    while True:
        word, value = asked.recv()
        if word == "load":
            scramble(system)
            try:
                found = ("found", digests(system)) if system.load(value) else ("nothing", None)
            except BaseException as error:  # as DCP's CheckpointException is
                found = ("raised", type(error).__name__)
            asked.send(found)
        else:
            train(system, value, place / "run", place / f"digests-{rank}", same, asked)


def train(system: System, step: int, folder: Path, written: Path, same: bool, asked: Connection) -> None:
    while True:
        step += 1
        system.step(batch(step))
        with open(written, "a") as file:
            file.write(json.dumps([step, digests(system)]) + "\n")
        dist.barrier()
        asked.send(("saving", step))
        started_s = time.perf_counter()
        system.save(folder, step, same)
        asked.send(("saved", step, time.perf_counter() - started_s))
        if asked.poll():
            return


def scramble(system: System) -> None:
    """So that what a load leaves alone is not taken for what it loaded."""
    with torch.no_grad():
        for tensor in system.tensors():
            if tensor.ndim:
                tensor.fill_(-7.0)


def quiet(path: Path) -> None:
    out = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.simplefilter("ignore")


class Ranks:
    """Two processes, forked from this one, in which nothing but imports has happened."""

    def __init__(self, name: str, place: Path, same: bool) -> None:
        with suppress(FileNotFoundError):
            (place / "meet").unlink()
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            ours, theirs = mp.get_context("fork").Pipe()
            process = mp.get_context("fork").Process(target=run_rank, args=(name, rank, place, same, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        assert self.answers() == ["ready"] * RANKS, "ranks did not start; see their logs"

    def ask(self, word: str, value: Any) -> None:
        for pipe in self.pipes:
            pipe.send((word, value))

    def answers(self) -> list[Any]:
        """One of each rank, until one says that it raised; ("hangs", None) or ("died", None) for a rank without one."""
        found: list[Any] = [("hangs", None)] * RANKS
        waiting = dict(enumerate(self.pipes))
        deadline_s = time.monotonic() + LIMIT_S
        while waiting and (ready := wait(list(waiting.values()), max(0.0, deadline_s - time.monotonic()))):
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    found[rank] = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    found[rank] = ("died", None)
            if any(answer[0] in ("raised", "died") for answer in found):
                deadline_s = min(deadline_s, time.monotonic() + 2.0)  # the others raise too, or wait for the one
        return found

    def heard(self, word: str, times: int, done: list[Any]) -> None:
        """Waits until rank 0 has said a word as often; what it said goes to `done`."""
        while times:
            assert self.pipes[0].poll(LIMIT_S), "rank 0 hangs in a save"
            done.append(self.pipes[0].recv())
            times -= done[-1][0] == word

    def strike(self, ranks: list[int]) -> None:
        """Kills some; the others are ended as torchrun does, by SIGTERM and then SIGKILL."""
        for rank in ranks:
            self.processes[rank].kill()
        time.sleep(0.1)  # torchrun looks after its ranks ten times a second
        self.end(signal.SIGTERM)

    def end(self, by: signal.Signals = signal.SIGKILL) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, by)
        for process in self.processes:
            process.join(GRACE_S)
            process.kill()
            process.join()


# -- what was found ----------------------------------------------------------------------------------------------------


def written_down(place: Path) -> list[dict[int, list[str]]]:
    """Of each rank the digests at each step; a step that was taken twice has the last ones."""
    found: list[dict[int, list[str]]] = []
    for rank in range(RANKS):
        path = place / f"digests-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("]]")]
        found.append({step: values for step, values in rows})
    return found


def judge(answers: list[Any], place: Path) -> tuple[str, int]:
    """In one word, and the step that was found."""
    words = [answer[0] for answer in answers]
    for word in ("died", "raised", "hangs"):
        if word in words:
            return word, 0
    if set(words) != {"found"}:
        return ("nothing", 0) if set(words) == {"nothing"} else ("differs", 0)
    known = written_down(place)
    whole = [{s for s, values in known[rank].items() if values == answers[rank][1]} for rank in range(RANKS)]
    if both := set.intersection(*whole):
        return "right", max(both)
    for rank, (_, values) in enumerate(answers):
        for at, value in enumerate(values):
            if not any(value == others[at] for others in known[rank].values()):
                return "wrong", 0
    return "mixed", 0


@contextmanager
def place_of(name: str, base: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=base) as folder:
        (Path(folder) / "run").mkdir()
        yield Path(folder)


def killed(name: str, same: bool, kills: int, dice: random.Random, base: Path | None) -> dict[str, Any]:
    """Trains and saves, is killed while it saves, starts again, …; a run that cannot go on is begun anew."""
    ends: Counter[str] = Counter()
    said: Counter[str] = Counter()
    took_s = [0.05]
    with place_of(name, base) as place:
        last = committed = 0
        while sum(ends.values()) < kills:
            ranks = Ranks(name, place, same)
            if committed or last:
                ranks.ask("load", place / "run")
                answers = ranks.answers()
                end, last = judge(answers, place)
                if end == "nothing" and not committed:
                    end = "nothing to lose"
                elif end in ("right", "nothing") and last < committed:
                    end = "lost"  # an older one, or none, though a newer save had ended
                ends[end] += 1
                said.update(text for word, text in answers if word == "raised")
                if end not in ("right", "nothing to lose"):
                    ranks.end()
                    shutil.rmtree(place / "run")
                    (place / "run").mkdir()
                    for rank in range(RANKS):
                        (place / f"digests-{rank}").unlink(missing_ok=True)
                    last = committed = 0
                    continue
            ranks.ask("train", last)
            told: list[Any] = []
            ranks.heard("saving", dice.randrange(1, 4), told)
            time.sleep(dice.uniform(0, 1.2 * statistics.median(took_s[-50:])))  # where in a save it strikes: chance
            ranks.strike(dice.choice([[0], [1], [0, 1]]))
            with suppress(EOFError, OSError):
                while ranks.pipes[0].poll():
                    told.append(ranks.pipes[0].recv())
            took_s += [word[2] for word in told if word[0] == "saved"]
            last = max([last, *(word[1] for word in told)])
            # rank 0's save has returned, which these libraries do behind a barrier
            committed = max([committed, *(word[1] for word in told if word[0] == "saved")])
    return {"trials": sum(ends.values()), "ends": dict(ends), "raised": dict(said),
            "save_s": round(statistics.median(took_s[1:] or took_s), 3)}  # fmt: skip


def one_checkpoint(name: str, place: Path) -> list[Path]:
    """Saved once, by ranks that then end; its files."""
    ranks = Ranks(name, place, False)
    ranks.ask("train", 0)
    ranks.ask("stop", 0)
    told: list[Any] = []
    ranks.heard("saved", 1, told)
    ranks.end()
    return sorted(path for path in (place / "run").rglob("*") if path.is_file() and path.stat().st_size)


class Loader:
    """Loads again and again; new ranks where the last load ended otherwise than by values on every rank."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self.ranks: Ranks | None = None

    def __call__(self) -> str:
        self.ranks = self.ranks or Ranks(self.name, self.place, False)
        self.ranks.ask("load", self.place / "run")
        answers = self.ranks.answers()
        words = {answer[0] for answer in answers}
        if words != {"found"} and not (self.name == "onefold" and words == {"raised"}):
            self.close()  # after an error in one rank the others may wait for it
        return judge(answers, self.place)[0]

    def close(self) -> None:
        if self.ranks:
            self.ranks.end()
        self.ranks = None


def flipped(name: str, flips: int, dice: random.Random, base: Path | None) -> dict[str, Any]:
    """One bit of all bytes of a checkpoint at a time."""
    ends: Counter[str] = Counter()
    with place_of(name, base) as place:
        files = one_checkpoint(name, place)
        sizes = [path.stat().st_size for path in files]
        load = Loader(name, place)
        assert load() == "right", "an intact checkpoint does not load"
        for path in dice.choices(files, weights=sizes, k=flips):
            at, bit = dice.randrange(path.stat().st_size), 1 << dice.randrange(8)
            flip(path, at, bit)
            ends[load()] += 1
            flip(path, at, bit)
        assert load() == "right", "the checkpoint was not put back as it was"
        load.close()
    return {"trials": flips, "ends": dict(ends), "bytes": sum(sizes)}


def flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def cut(name: str, base: Path | None) -> dict[str, Any]:
    """Each file in turn is missing, empty, half there, or lacks its last byte."""
    ends: Counter[str] = Counter()
    with place_of(name, base) as place:
        files = one_checkpoint(name, place)
        load = Loader(name, place)
        for path in files:
            whole = path.read_bytes()
            for size in (None, 0, len(whole) // 2, len(whole) - 1):
                path.unlink()
                if size is not None:
                    path.write_bytes(whole[:size])
                ends[load()] += 1
                path.write_bytes(whole)
        assert load() == "right", "the checkpoint was not put back as it was"
        load.close()
    return {"trials": sum(ends.values()), "ends": dict(ends)}


def tried(name: str, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    dice, started_s = random.Random(asked.seed), time.monotonic()
    if kind == "bit flips":
        found = flipped(name, asked.flips, dice, asked.folder)
    elif kind == "files missing or cut":
        found = cut(name, asked.folder)
    else:
        found = killed(name, kind == "kills, over the last one", asked.kills, dice, asked.folder)
    return {**found, "seconds": round(time.monotonic() - started_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--kills", type=int, default=30, help="of each library, and each way to save")
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to try, instead of the one of $TMPDIR")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    of = versions()
    for name in asked.systems:
        import_system(name)
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        rows = found.get(name, {}).get("trials", {})
        found[name] = {"date": date, "machine": machine(), "version": of.get(name, of["torch"]), "trials": rows}
        for kind in asked.kinds:
            rows[kind] = tried(name, kind, asked)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            print(name, kind, rows[kind], flush=True)


def import_system(name: str) -> None:
    """Here, so that the ranks, which are forked, need not."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    modules = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
    own = {
        "onefold": ["onefold.sharding", "onefold.optim.optimizer"],
        "deepspeed": ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"],
    }
    for module in [*modules, *own.get(name, [])]:
        importlib.import_module(module)


if __name__ == "__main__":
    sys.exit(main())
