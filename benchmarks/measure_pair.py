"""What two ranks reach that share one GPU over NCCL: their link, and what each computes while the other computes too.

    python -m benchmarks.measure_pair          # on a GPU, with CUDA MPS if it is there; about a minute
    python -m benchmarks.measure_pair --quick --out runs/pair.json   # tiny, on any machine, to see that it runs

The record is one of `onefold measure` with the part "links", and a part "shared" beside it, of which every row is what
the slower of the two ranks took. `python -m benchmarks.predicted` plans the runs of `python -m benchmarks.gpu --nccl 2`
with it: no figure of these runs is in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import crew
from benchmarks.results import RESULTS, shown_command, write
from benchmarks.work import Work, shared_gpu
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending, Reduction
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Label, Meter
from onefold.comm.shutdown import shutdown
from onefold.cost.rates import Rates
from onefold.planner.device.block import HEAD, Block
from onefold.planner.device.clock import Clock
from onefold.planner.device.record import measure
from tests.harness.mps import mps_daemon

PAIR = "links-nccl-pair-nvidia-h200.json"
PATIENCE_S = 240.0
FOR_S = 1.0  # of computing at the same time
ROUNDS, WARM_UP = 7, 2
PARAMETERS = 1 << 25  # of an update
MESSAGES = 8  # that follow each other
LABEL = Label("measure", "pair")
Message = Callable[[], Pending | Reduction]


def works(quick: bool) -> list[Work]:
    """The works whose blocks are timed: those of the runs."""
    found = list(shared_gpu().values())
    if not quick:
        return found
    on = "cuda" if torch.cuda.is_available() else "cpu"
    return [dataclasses.replace(found[0].quick(), device=on, threads=1 if on == "cpu" else None)]


def computing(work: Work) -> Callable[[], object]:
    """Forward and backward of one block of a work."""
    device, dtype = work.target, work.compute
    with device:
        block = Block(work.dim, work.dim // HEAD).to(dtype)
    shape = (work.batch, work.seq, work.dim)
    x, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    inputs = (x.requires_grad_(), *block.parameters())
    return lambda: torch.autograd.grad(block(x), inputs, grad)


def updating(device: torch.device, numel: int) -> Callable[[], object]:
    """torch's fused AdamW over so many fp32 parameters: it moves bytes, and hardly computes."""
    param = torch.nn.Parameter(torch.full((numel,), 0.02, device=device))
    param.grad = torch.full_like(param, 1e-3)
    return torch.optim.AdamW([param], fused=True).step


class Busy(NamedTuple):
    """Seconds of one message, and of one block, while the other goes on."""

    message_s: float
    block_s: float


class Pair:
    """The two ranks, who compute alone, at the same time, and while messages are in flight."""

    def __init__(self, clock: Clock, comm: Comm) -> None:
        self._clock, self._comm = clock, comm
        self._for_s = 0.05 if clock.quick else FOR_S

    def slowest(self, seconds: float) -> float:
        """Of both ranks, the longer time. Collective, so the ranks go on together."""
        found = self._comm.all_gather_bytes(struct.pack("d", seconds), LABEL)
        return max(struct.unpack("d", one)[0] for one in found)

    def meet(self) -> None:
        self.slowest(0.0)

    def one(self, work: Callable[[], object]) -> float:
        """Seconds of some work, the median over a while in which it runs again and again."""
        work()
        times, end = list[float](), time.monotonic() + self._for_s
        while time.monotonic() < end:
            times.append(self._clock.mean_s(work, 2 if self._clock.quick else 10))
        return statistics.median(times)

    def alone_and_shared(self, work: Callable[[], object]) -> list[float]:
        """Seconds of some work while the other rank waits, and while it does the same."""
        alone = 0.0
        for turn in range(self._comm.size):
            alone = max(alone, self.slowest(self.one(work) if turn == self._comm.rank else 0.0))
        return [alone, self.slowest(self.one(work))]

    def round_s(self, work: Callable[[], object]) -> float:
        """Seconds of work that both ranks begin together: the median."""
        times = []
        for _ in range(ROUNDS):
            self.meet()
            times.append(self.slowest(self._clock.wall_s(work)))
        return statistics.median(times[WARM_UP:])

    def messages(self, work: Work, compute: Callable[[], object], block_s: float) -> list[float]:
        """How the messages of a block's unit share the link with each other, and the device with compute."""
        numel = 12 * work.dim**2 // self._comm.size * self._comm.size
        flat, grads = (torch.ones(numel, dtype=work.compute, device=work.target) for _ in range(2))
        needed = self._comm.scratch_numel(numel // self._comm.size, grads.dtype)
        scratch = torch.empty(needed, dtype=grads.dtype, device=work.target)
        gather = partial(self._comm.all_gather, flat, LABEL)
        reduce = partial(self._comm.reduce_scatter, grads, scratch, LABEL)

        def both() -> None:
            one, other = gather(), reduce()
            one.wait()
            other.wait()

        gather_s, reduce_s = self.round_s(lambda: gather().wait()), self.round_s(lambda: reduce().wait())
        gathered, reduced = (
            self.busy(message, one, compute, block_s) for message, one in ((gather, gather_s), (reduce, reduce_s))
        )
        slowed_s = max(gathered.block_s, reduced.block_s)
        return [
            flat.numel() * flat.itemsize, gather_s, reduce_s, self.round_s(both), gathered.message_s, reduced.message_s,
            block_s, slowed_s,
        ]  # fmt: skip

    def busy(self, message: Message, message_s: float, compute: Callable[[], object], block_s: float) -> Busy:
        """Messages that follow each other while both ranks compute. What each takes alone is given, so that compute
        outlasts them. On a CPU, where no stream holds work in advance, a message and a block begin together."""
        if not self._clock.cuda:
            took = self.round_s(lambda: at_once(message, compute))
            return Busy(took, took)
        surely = max(1, int(MESSAGES * message_s / block_s))  # blocks that end before messages do
        outlasting = 2 + math.ceil(3 * MESSAGES * message_s / block_s)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        messages_s, blocks_s = [], []
        for _ in range(ROUNDS):
            began, ended, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
            self.meet()
            first.record(current)
            compute()
            with torch.cuda.stream(side):
                began.record(side)
                for _ in range(MESSAGES):
                    message().wait()
                ended.record(side)
            for number in range(1, outlasting):
                if number == surely:
                    last.record(current)
                compute()
            torch.cuda.synchronize()
            messages_s.append(self.slowest(began.elapsed_time(ended) / 1e3 / MESSAGES))
            blocks_s.append(self.slowest(first.elapsed_time(last) / 1e3 / surely))
        return Busy(statistics.median(messages_s[WARM_UP:]), statistics.median(blocks_s[WARM_UP:]))


def at_once(message: Message, compute: Callable[[], object]) -> None:
    pending = message()
    compute()
    pending.wait()


def shared(clock: Clock, quick: bool) -> dict[str, Any]:
    """The part "shared" of the record. Collective."""
    comm = Comm(axes_of(None).shard, clock.device, PATIENCE_S, Meter())
    comm.connect()
    pair = Pair(clock, comm)
    found: dict[str, Any] = {
        "columns": {
            "blocks": "tokens, hidden size, seconds of forward and backward of one rank alone, and of each of two",
            "updates": "parameters, seconds of one rank alone, and of each of two",
            "messages": "bytes of all ranks; seconds of an all-gather, of a reduce-scatter, and of both at once; of an "
            "all-gather and of a reduce-scatter while both ranks compute; of a block, and of one beside messages",
        },
        "ranks": comm.size, "blocks": [], "updates": [], "messages": [],
    }  # fmt: skip
    for work in works(quick):
        clock.heat()
        compute = computing(work)
        rows = pair.alone_and_shared(compute)
        found["blocks"].append([work.batch * work.seq, work.dim, *rows])
        found["messages"].append(pair.messages(work, compute, rows[1]))
    numel = 1 << 12 if quick else PARAMETERS
    found["updates"].append([numel, *pair.alone_and_shared(updating(clock.device, numel))])
    return found


def rank_main(asked: argparse.Namespace, words: list[str]) -> None:
    """One of the two ranks."""
    clock = Clock(works(asked.quick)[0].target, 0.0 if asked.quick else 0.01, asked.quick)
    if not clock.cuda:
        torch.set_num_threads(1)
    record = measure(clock, shown_command("benchmarks.measure_pair", words), ["links"])
    record["shared"] = {"mps": asked.mps, **shared(clock, asked.quick)}
    if asked.rank == 0:
        write(asked.out, record)
        sys.stdout.write("".join(f"{line}\n" for line in Rates(record).lines()))
        sys.stdout.write("".join(f"{name}: {rows}\n" for name, rows in record["shared"].items()))
    shutdown()


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure_pair", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / PAIR, help="the file to write")
    parser.add_argument("--quick", action="store_true", help="tiny; without a GPU over gloo on the CPU")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mps", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    asked = arguments(words)
    if asked.rank is not None:
        rank_main(asked, [word for word in words if word == "--quick"])
        return 0
    work, port = works(asked.quick)[0], crew.free_port()
    if work.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device found; run this on a machine with one, or try it out with --quick\n")
        return 2
    with mps_daemon() if work.device == "cuda" else nullcontext() as mps:
        own = ["-m", "benchmarks.measure_pair", *words, *(["--mps"] if mps else [])]
        environs = [crew.environment(work, rank, port) | (mps.environ if mps else {}) for rank in range(work.ranks)]
        ranks = [crew.start_worker(*own, "--rank", str(rank), env=env) for rank, env in enumerate(environs)]
        try:
            return max(rank.wait(PATIENCE_S) for rank in ranks)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"the ranks did not end within {PATIENCE_S:.0f} s\n")
            return 1
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


if __name__ == "__main__":
    sys.exit(main())
