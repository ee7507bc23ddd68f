"""Updates as jobs of two threads: those first whose units the next forward needs first.

While one thread is inside a kernel, which uses the cores and does not hold Python's lock, the other brings what the
next job needs. What a job sends away travels behind the next.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onefold.gradients import Parcel
from onefold.slices import UnitOptimizer
from onefold.spans import NOTHING, span
from onefold.tiers.host import Mark

WORKERS = 2
BEHIND = 1  # jobs of each whose results may still travel
UNDER_WAY = WORKERS * (1 + BEHIND)  # jobs that hold buffers


@dataclass
class Job:
    """The update of one unit."""

    optimizer: UnitOptimizer
    groups: list[dict[str, Any]]
    kept: bytes  # of the unit's parameters
    factor: float | Tensor
    parcel: Parcel | None
    after: Mark  # the device no longer reads the old values
    values: bool  # some of them stay, so all are needed
    done: threading.Event = field(default_factory=threading.Event)
    arrived: Mark = field(default_factory=Mark)
    room_bytes: int = 0  # backward waits for them
    error: BaseException | None = None

    def wait(self) -> None:
        """Until compute may use the new values."""
        with NOTHING if self.done.is_set() else span("wait", "update", self.optimizer.unit.name):
            self.done.wait()
        if self.error is not None:
            raise self.error
        self.arrived.order()

    def fail(self, error: BaseException) -> None:
        self.error, self.parcel = error, None
        self.done.set()

    def run(self) -> None:
        unit = self.optimizer.unit
        try:
            unit.prepare(self.after, values=self.values)
            unit.open()
            with torch.no_grad(), span("update", "host", unit.name):
                self.optimizer.update(self.groups, bytearray(self.kept), 0, self.factor, parcel=self.parcel)
            self.arrived = unit.close(changed=True, after=self.after)
        except BaseException as error:
            self.error = error
        self.parcel = None


class Room:
    """Bytes that may be taken at once: who asks for more waits until others have given theirs back."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._taken <= 0 or self._taken + nbytes <= self.total_bytes)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        if nbytes:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


class Line:
    """Jobs that wait, those first that come first in the next forward."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, place: int, job: Job) -> None:
        with self._changed:
            if self._error is not None:
                job.fail(self._error)
                return
            heapq.heappush(self._heap, (place, next(self._count), job))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Nobody does jobs any more: whoever waits for one hears why."""
        with self._changed:
            self._error = error
            while self._heap:
                self._heap.pop()[2].fail(error)

    def get(self, *, wait: bool) -> Job | None:
        """The next job; None if there is none, with `wait` only once all is over."""
        with self._changed:
            while wait and not self._heap and not self._closed:
                self._changed.wait()
            return heapq.heappop(self._heap)[2] if self._heap and not self._closed else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def work(line: Line, room: Room, device: torch.device) -> None:
    """The thread that updates."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _work(line, room)
    except BaseException as error:
        line.fail(error)
        room.give(1 << 60)  # backward may be waiting for it


def _work(line: Line, room: Room) -> None:
    behind: deque[Job] = deque()
    while True:
        job = line.get(wait=not behind)
        if job is not None:
            job.run()
            job.done.set()
            room.give(job.room_bytes)
            behind.append(job)
        elif not behind:
            return
        while len(behind) > (BEHIND if job is not None else 0):
            _reap(behind.popleft())
        job = None  # hold nothing while waiting


def _reap(job: Job) -> None:
    if job.error is None:
        try:
            job.optimizer.unit.reap()
        except BaseException as error:
            job.error = error
