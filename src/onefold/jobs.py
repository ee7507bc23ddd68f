"""Updates as jobs of one thread: those first whose units the next forward needs first.

The thread prepares the next job before it does one, and what a job sends away travels behind the next.
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

AHEAD = 2  # jobs prepared before their turn
BEHIND = 1  # jobs whose results may still travel


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
    inside: bool = False  # backward waits for its room
    error: BaseException | None = None

    def wait(self) -> None:
        """Until compute may use the new values."""
        with NOTHING if self.done.is_set() else span("wait", "update", self.optimizer.unit.name):
            self.done.wait()
        if self.error is not None:
            raise self.error
        self.arrived.order()

    def run(self) -> None:
        unit = self.optimizer.unit
        try:
            unit.open()
            with torch.no_grad(), span("update", "host", unit.name):
                self.optimizer.update(self.groups, bytearray(self.kept), 0, self.factor, parcel=self.parcel)
            self.arrived = unit.close(changed=True, after=self.after)
        except BaseException as error:
            self.error = error
        self.parcel = None


class Line:
    """Jobs that wait, those first that come first in the next forward."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, place: int, job: Job) -> None:
        with self._changed:
            heapq.heappush(self._heap, (place, next(self._count), job))
            self._changed.notify()

    def get(self, *, wait: bool) -> Job | None:
        """The next job; None if there is none, with `wait` only once all is over."""
        with self._changed:
            while wait and not self._heap and not self._closed:
                self._changed.wait()
            return heapq.heappop(self._heap)[2] if self._heap and not self._closed else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def work(line: Line, room: threading.Semaphore, device: torch.device) -> None:
    """The thread that updates."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready: deque[Job] = deque()
    behind: deque[Job] = deque()
    while True:
        while len(ready) < AHEAD and (job := line.get(wait=not ready and not behind)):
            try:
                job.optimizer.unit.prepare(job.after, values=job.values)
            except BaseException as error:
                job.error = error
            ready.append(job)
        if ready:
            job = ready.popleft()
            if job.error is None:
                job.run()
            job.done.set()
            if job.inside:
                room.release()
            behind.append(job)
        elif not behind:
            return
        while len(behind) > (BEHIND if ready else 0):
            last = behind.popleft()
            if last.error is None:
                try:
                    last.optimizer.unit.reap()
                except BaseException as error:
                    last.error = error
        job = last = None  # type: ignore[assignment]  # hold nothing while waiting
