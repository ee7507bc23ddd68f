"""How long each rank computes in a step, without its waits for messages; a rank that is far slower is named.

On a CPU every step is timed by the clock. On CUDA only a logged step is, by events on the device, which are read when
its loss has been read: nobody waits for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from onefold.comm.communicator import Comm
from onefold.comm.waits import Waits
from onefold.runtime.engine import Engine
from onefold.train.run.diagnose import Finding

FACTOR = 1.5  # times the median of the others: more is a straggler,
LEAST_S = 0.005  # if it is so much in seconds,
ROWS = 3  # and the same rank in so many logged rows one after the other


class Compute(NamedTuple):
    """Seconds of a step that ranks compute, without their waits: the median of all, and the most."""

    compute_s: float
    slowest_s: float
    slowest_rank: int


class Pace:
    """The times of this rank since the last logged row."""

    def __init__(self, engine: Engine, comm: Comm) -> None:
        self._cuda = engine.device.type == "cuda"
        self._waits = Waits()
        self._began_s, self._waited_s, self._spent_s, self._steps = 0.0, 0.0, 0.0, 0
        self._first: torch.Event | None = None
        for one in (*engine.comms, comm):
            one.waits = self._waits

    def begin(self, *, log: bool) -> None:
        """A step begins; `log` says whether it will be logged."""
        if not self._cuda:
            self._began_s, self._waited_s = time.perf_counter(), self._waits.host_s
        elif log:
            self._waits.begin()
            self._first = torch.Event("cuda", enable_timing=True)
            self._first.record()

    def end(self) -> None:
        """The step has ended, on a CPU; on CUDA it has been enqueued, and the host waits for it next."""
        if not self._cuda:
            self._spent_s += time.perf_counter() - self._began_s - (self._waits.host_s - self._waited_s)
            self._steps += 1
        elif self._first is not None:
            self._last = torch.Event("cuda", enable_timing=True)
            self._last.record()

    def mine_s(self) -> float:
        """Seconds of a step that this rank has computed since the last call. On CUDA, once the host has waited for the
        device."""
        if not self._cuda:
            spent_s, steps = self._spent_s, self._steps
            self._spent_s, self._steps = 0.0, 0
            return spent_s / max(1, steps)
        if self._first is None:
            return 0.0
        first, self._first = self._first, None
        self._last.synchronize()  # recorded before the loss that was read
        return first.elapsed_time(self._last) / 1e3 - self._waits.read_stream_s()


class Stragglers:
    """The ranks that were slow in the last logged rows."""

    def __init__(self) -> None:
        self._slow: list[int] = []

    def found(self, times_s: Sequence[float]) -> Finding | None:
        """Counts a logged row of all ranks' times; a rank that was the straggler of the last ROWS rows is found."""
        self._slow = [*self._slow, straggler(times_s)][-ROWS:]
        if len(self._slow) < ROWS or self._slow[0] < 0 or len(set(self._slow)) > 1:
            return None
        rank = self._slow[0]
        others_s = statistics.median(_others(times_s, rank))
        return Finding(
            "straggler",
            f"rank {rank} computes {times_s[rank] * 1e3:.0f} ms in a step, without its waits, and the others "
            f"{others_s * 1e3:.0f} ms (the median), so that all wait for it; look at its machine: other programs, "
            f"heat, a slow disk of its data",
        )


def compute(times_s: Sequence[float]) -> Compute:
    slowest = max(range(len(times_s)), key=lambda rank: times_s[rank])
    return Compute(statistics.median(times_s), times_s[slowest], slowest)


def straggler(times_s: Sequence[float]) -> int:
    """The rank that takes far longer than the others; -1 if none does.

    >>> straggler([0.10, 0.31, 0.11]), straggler([0.10, 0.12, 0.11]), straggler([0.001, 0.003])
    (1, -1, -1)
    """
    rank = compute(times_s).slowest_rank
    others_s = _others(times_s, rank)
    most_s = statistics.median(others_s) if others_s else times_s[rank]
    return rank if times_s[rank] > FACTOR * most_s and times_s[rank] - most_s > LEAST_S else -1


def _others(times_s: Sequence[float], rank: int) -> list[float]:
    return [*times_s[:rank], *times_s[rank + 1 :]]
