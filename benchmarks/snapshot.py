"""Which part of a copy in memory delays the steps after it, on a GPU: its snapshot, by its stream and the number of its
transfers, or the work in the background.

    python -m benchmarks.snapshot [--layers 4] [--hidden 1024] [--batch 32] [--seq 1024] [--rounds 5]

One process, one rank. Blocks of 10 steps take turns: without a copy, with a snapshot and nothing after it, with a whole
copy, and with what a whole copy does in the background alone. A snapshot leaves the device beside compute or in its
stream, as few transfers of neighbours or one for each parameter and state. Printed are medians: a block's time beside
the mean of the blocks without a copy before and after it, time in the call, on the device from the call to the
snapshot's end, and of the first, second and slowest later step. With --device cpu it only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import onefold
from onefold.checkpoint.memory import resilient
from onefold.checkpoint.memory.places import MEMORY, SHARED_MEMORY
from onefold.checkpoint.protocol.background import Worker
from onefold.checkpoint.protocol.snapshot import staged
from onefold.checkpoint.protocol.state import OwnedElements
from onefold.comm.streams import SideStream
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT

STEPS, VOCAB, POLL_S = 10, 256, 0.02
Snapshot = Callable[[Sequence[OwnedElements], torch.device, Worker, SideStream | None], list[OwnedElements]]


class Variant(NamedTuple):
    beside: bool = False  # in a stream of its own, else in that of compute
    pieces: bool = False  # a transfer for each parameter and state, as before neighbours were joined
    snapshot: bool = True  # taken anew; else the one before is copied once more
    background: bool = False  # hashed and written


VARIANTS = {
    "snapshot, beside": Variant(beside=True),
    "snapshot, beside, in pieces": Variant(beside=True, pieces=True),
    "snapshot, in compute": Variant(),
    "snapshot, in compute, in pieces": Variant(pieces=True),
    "copy, beside": Variant(beside=True, background=True),
    "copy, beside, in pieces": Variant(beside=True, pieces=True, background=True),
    "copy, in compute": Variant(background=True),
    "copy, in compute, in pieces": Variant(pieces=True, background=True),
    "background alone": Variant(snapshot=False, background=True),
}


class Times(NamedTuple):
    """Of a block of steps, in milliseconds; on the device where there is one."""

    wall: float
    call: float = 0.0
    snapshot: float = 0.0
    first: float = 0.0
    second: float = 0.0
    slowest: float = 0.0  # of the later steps


class Clock:
    """Marks on a stream of the device, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) if self._cuda else (after - before) * 1000

    def ended(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() * 1000


class Bench:
    def __init__(self, work: argparse.Namespace, memory: Path) -> None:
        torch.manual_seed(0)
        device, self._memory = torch.device(work.device), memory
        shape = Shape(
            layers=work.layers, hidden=work.hidden, heads=max(1, work.hidden // 64), seq=work.seq, vocab=VOCAB
        )
        self._model = onefold.shard(GPT(shape).to(device), stage=3, precision="bf16")
        self._optimizer = onefold.Optimizer(self._model, torch.optim.AdamW, lr=1e-4)
        self._tokens = torch.randint(0, VOCAB, (work.batch, work.seq), device=device)
        self._clock, self._number = Clock(device), 0
        self._last: list[OwnedElements] = []  # the last snapshot
        self._marks: list[Any] = []
        self._run = onefold.resilient(memory / "disk", self._model, self._optimizer, every=1)

    def step(self) -> None:
        self._optimizer.backward(self._model(self._tokens, self._tokens))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def snapshot(self, variant: Variant) -> Snapshot:
        def take(
            owned: Sequence[OwnedElements], device: torch.device, worker: Worker, beside: SideStream | None
        ) -> list[OwnedElements]:
            self._marks.append(self._clock.mark())
            if variant.snapshot:
                given = [one._replace(direct=False) for one in owned] if variant.pieces else owned
                self._last = staged(given, device, worker, beside if variant.beside else None)
            if variant.beside and beside is not None:
                with beside.after_current():
                    self._marks.append(self._clock.mark())
            else:
                self._marks.append(self._clock.mark())
            return self._last

        return take

    def block(self, variant: Variant | None) -> Times:
        self._clock.ended()
        self._number, self._marks = self._number + 1, []
        began = time.perf_counter() * 1000
        with ExitStack() as patched:
            if variant is not None:
                patched.enter_context(patch.object(resilient, "staged", self.snapshot(variant)))
                if not variant.background:
                    patched.enter_context(patch.object(resilient, "copy", lambda *_: None))
                self._run.step(step=self._number)
            called = time.perf_counter() * 1000
            marks = [self._clock.mark()]
            for _ in range(STEPS):
                self.step()
                marks.append(self._clock.mark())
            wall = self._clock.ended() - began
            while variant is not None and variant.background and not self.complete():
                time.sleep(POLL_S)
            time.sleep(POLL_S)  # a thread that only waits for the event ends before its patch does
        each = [self._clock.ms(*pair) for pair in pairwise(marks)]
        taken = self._clock.ms(*self._marks) if variant is not None else 0.0
        return Times(wall, called - began, taken, each[0], each[1], max(each[2:]))

    def complete(self) -> bool:
        return bool(list(self._memory.glob(f"node/*/step-{self._number:08}-*")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 4), ("hidden", 1024), ("batch", 32), ("seq", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    work = parser.parse_args()
    onefold.init()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as memory:
        os.environ[MEMORY] = f"{memory}/node"
        bench = Bench(work, Path(memory))
        for variant in (None, *VARIANTS.values()):  # allocations, and a snapshot for the background alone
            bench.block(variant)
        found: dict[str, list[Times]] = {name: [] for name in VARIANTS}
        ratios: dict[str, list[float]] = {name: [] for name in VARIANTS}
        plain = [bench.block(None)]
        for number in range(work.rounds):
            names = list(VARIANTS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(bench.block(VARIANTS[name]))
                plain.append(bench.block(None))
                ratios[name].append(2 * found[name][-1].wall / (plain[-1].wall + plain[-2].wall))
        print(f"{STEPS} steps without a copy: {statistics.median(one.wall for one in plain):.1f} ms")
        print(f"{'':32}{'times':>8}{'from':>7}{'to':>7}{'call':>8}{'taken':>8}{'1st':>8}{'2nd':>8}{'later':>8}  ms")
        for name, times in found.items():
            row = [statistics.median(column) for column in zip(*times, strict=True)][1:]
            text = "".join(f"{one:8.1f}" for one in row)
            print(
                f"{name:32}{statistics.median(ratios[name]):8.2f}{min(ratios[name]):7.2f}{max(ratios[name]):7.2f}{text}"
            )
    onefold.shutdown()


if __name__ == "__main__":
    main()
