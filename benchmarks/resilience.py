"""What copies of the state in memory cost, and how long a run takes to go on after a rank was killed.

    python -m benchmarks.resilience [--ranks 3] [--hidden 256] [--layers 4] [--batch 4] [--rounds 10] [--json]
    python -m benchmarks.resilience --device cuda --ranks 2 --hidden 1024 --layers 8 --batch 32 --seq 1024 --rounds 4

Cost: blocks of 10 steps with a copy at their start and without one take turns, so that both see the same machine. Each
rank counts as a node of its own: its copy travels to the next rank. The CPU time of a copy is also measured without
steps beside it: other programs disturb that least. Kill: `onefold train --elastic` with as many local
ranks, of which one is killed; timed until the first step after the copy is written down. With --device cuda the steps
are in bf16; ranks share GPU 0 over NCCL through loopback sockets, and none is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import onefold
from onefold.checkpoint.format.folder import step_name
from onefold.checkpoint.memory.places import MEMORY, SHARED_MEMORY
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT
from onefold.train.run.records import read_lines
from tests.harness.mps import mps_daemon
from tests.harness.worlds import shared_gpu_environ

EVERY = 10
COMMAND = Path(onefold.__file__).parents[1] / "onefold_command.py"  # beside the package
RANK = "ONEFOLD_BENCHMARK"  # in the environment of ranks: the folder of all nodes' memory
VOCAB = 256
MOST_S = 300.0
POLL_S = 0.05


class Times(NamedTuple):
    """Of a block of steps on one rank."""

    wall_s: float
    cpu_s: float  # of all threads: less disturbed by other programs
    call_s: float  # in step(), on the calling thread


class Work(NamedTuple):
    """What is trained, and where."""

    device: str
    layers: int
    hidden: int
    batch: int
    seq: int
    rounds: int

    @property
    def words(self) -> list[str]:
        return [word for name, value in self._asdict().items() for word in (f"--{name}", str(value))]


def one_rank(memory: Path, work: Work) -> None:
    if work.device == "cuda":
        os.environ.update(shared_gpu_environ(int(os.environ["RANK"])))
    onefold.init()
    rank, ranks, rounds = dist.get_rank(), dist.get_world_size(), work.rounds
    os.environ[MEMORY] = str(memory / f"node{rank}")
    torch.manual_seed(0)
    shape = Shape(layers=work.layers, hidden=work.hidden, heads=work.hidden // 64, seq=work.seq, vocab=VOCAB)
    model = onefold.shard(GPT(shape).to(work.device), stage=3, precision="bf16" if work.device == "cuda" else "fp32")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    tokens = torch.randint(0, VOCAB, (work.batch, work.seq), device=work.device)

    def ended() -> float:
        if work.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def block(copied: Callable[[], None] = lambda: None, done: Callable[[], bool] = lambda: True) -> Times:
        ended()
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        copied()
        called = time.perf_counter()
        for _ in range(EVERY):
            optimizer.backward(model(tokens, tokens))
            optimizer.step()
            optimizer.zero_grad()
        wall_s = ended() - began
        while not done():  # usually the copy is complete long before
            time.sleep(POLL_S)
        return Times(wall_s, time.process_time() - cpu, called - began)

    with onefold.resilient(memory / "disk", model, optimizer, every=1) as run:
        block()
        plain, copied = [], []
        for number in range(rounds):
            plain.append(block())
            copied.append(block(partial(run.step, step=number), partial(complete, memory, number, ranks)))
        alone, alone_s = [], []
        for number in range(rounds, 2 * rounds):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            run.step(step=number)
            while not complete(memory, number, ranks):
                time.sleep(POLL_S)
            alone.append(time.process_time() - cpu)
            alone_s.append(time.perf_counter() - began)
        size = sum(p.stat().st_size for p in memory.glob(f"node{rank}/*/step-*/rank-{rank:05}.*"))
    if rank == 0:
        pairs = list(zip(copied, plain, strict=True))
        found = {
            "step_s": statistics.median(one.wall_s for one in plain) / EVERY, "copy_bytes": size,
            "cost": statistics.median(c.wall_s / p.wall_s for c, p in pairs) - 1,
            "cpu_cost": statistics.median(c.cpu_s / p.cpu_s for c, p in pairs) - 1,
            "call_s": statistics.median(one.call_s for one in copied),
            "copy_cpu_s": statistics.median(alone), "copy_s": statistics.median(alone_s),
            "step_cpu_s": statistics.median(one.cpu_s for one in plain) / EVERY,
        }  # fmt: skip
        (memory / "found.json").write_text(json.dumps(found))
    onefold.shutdown()


def complete(memory: Path, step: int, ranks: int) -> bool:
    """Whether the copies of all ranks are complete."""
    return len(list(memory.glob(f"*/*/{step_name(step)}-*"))) == ranks


def measured_cost(ranks: int, work: Work) -> dict[str, float]:
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    several = mps_daemon() if work.device == "cuda" else nullcontext()
    with tempfile.TemporaryDirectory(dir=base) as memory, several as mps:
        shared = mps.environ if mps else {}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = ["--module", "benchmarks.resilience", *work.words]
        subprocess.run([*command, *words], env={**os.environ, **shared, RANK: memory}, check=True)
        return json.loads((Path(memory) / "found.json").read_text())


def measured_kill(ranks: int) -> dict[str, float]:
    """Seconds from the end of a rank to the next step that is written down, and the steps that were done again."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["--out", str(out), "--elastic", f"{ranks - 1}:{ranks}", "--copy-every", str(EVERY), "--log-every", "1"]
        words += ["--steps", "100000", "--eval-every", "0", "--save-every", "0", "--seq", "32"]
        process = subprocess.Popen([sys.executable, str(COMMAND), "train", *words], stdout=subprocess.DEVNULL)
        try:
            _until(lambda: _steps(out) > 2 * EVERY)
            os.kill(_pid_of(process.pid, rank=1), signal.SIGKILL)
            began_s = time.monotonic()
            reached = _steps(out)
            _until(lambda: _restored(out) is not None)
            return {"kill_s": time.monotonic() - began_s, "steps_again": reached - (_restored(out) or 0)}
        finally:
            process.terminate()
            process.wait()


def _restored(out: Path) -> int | None:
    """The step after which the run went on, once the next one is written down."""
    rows = [row for row in read_lines(out / "warnings.jsonl") if row["kind"] == "elastic"]
    return rows[0]["step"] - 1 if rows else None


def _steps(out: Path) -> int:
    rows = read_lines(out / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def _until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + MOST_S
    while not what():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the run did not come so far; see its output")
        time.sleep(0.01)


def _pid_of(launcher: int, rank: int) -> int:
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()  # of a forked rank, whose environ is the launcher's
        if f"RANK={rank}".encode() in words or name == f"onefold rank {rank}":
            return int(pid)
    raise ProcessLookupError(f"no process of rank {rank} was found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=128, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    work = Work(*(getattr(asked, name) for name in Work._fields))
    if RANK in os.environ:
        return one_rank(Path(os.environ[RANK]), work)
    found = measured_cost(asked.ranks, work)
    if asked.device == "cpu":
        found |= measured_kill(asked.ranks)
    if asked.json:
        print(json.dumps(found))
        return
    print(f"{asked.ranks} ranks, {found['copy_bytes'] / 1e6:.1f} MB of state each, a copy every {EVERY} steps")
    print(f"  step        {found['step_s'] * 1000:8.1f} ms")
    print(f"  copy        {found['cost']:8.1%}    of the time of its steps; wanted: at most 2%")
    print(f"  its CPU time{found['cpu_cost']:8.1%}    of that of its steps, all threads")
    alone, steps = found["copy_cpu_s"], EVERY * found["step_cpu_s"]
    print(f"  alone       {alone / steps:8.1%}    of the CPU time of {EVERY} steps: {alone * 1000:.0f} ms on rank 0")
    print(f"  complete    {found['copy_s']:8.2f} s  after the call, without steps beside it")
    print(f"  its snapshot{found['call_s'] * 1000:8.1f} ms on the calling thread")
    if "kill_s" in found:
        again = f"{found['steps_again']} steps again"
        print(f"  kill        {found['kill_s']:8.1f} s  to the next step, {again}; wanted: 15 s")


if __name__ == "__main__":
    main()
