"""Updates as jobs of a few threads: of those whose gradients are made, the one whose unit the next forward needs first.

While one thread is inside a kernel, which uses the cores and does not hold Python's lock, the others bring what their
jobs need, or send away what came of them.

Inside backward the host asks for work far ahead of the device, and the unit that the next forward needs first has its
gradient last. So a job that was put last is not taken before the device has come to it, as long as others are ready.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onefold.comm.spans import NOTHING, span
from onefold.offload.host import Mark
from onefold.offload.host_memory import give_back
from onefold.offload.transfer import GradientTransfer
from onefold.optim.unit_optimizer import UnitOptimizer


@dataclass
class Job:
    """The update of one unit."""

    optimizer: UnitOptimizer
    groups: list[dict[str, Any]]
    kept: bytes  # of the unit's parameters
    factor: float | Tensor
    transfer: GradientTransfer | None
    after: Mark  # the device no longer reads the old values
    values: bool  # some of them stay, so all are needed
    done: threading.Event = field(default_factory=threading.Event)
    arrived: Mark = field(default_factory=Mark)
    error: BaseException | None = None

    def ready(self) -> bool:
        """Whether the device has come to where it can run."""
        return self.after.passed() and (self.transfer is None or self.transfer.landed.passed())

    def wait(self) -> None:
        """Until compute may use the new values."""
        with NOTHING if self.done.is_set() else span("wait", "update", self.optimizer.unit.name):
            self.done.wait()
        if self.error is not None:
            raise self.error
        self.arrived.order()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._let_go()
        self.done.set()

    def run(self) -> None:
        unit = self.optimizer.unit
        try:
            unit.prepare(self.after, values=self.values)
            if self.transfer is not None:
                self.transfer.bring()
            unit.open()
            with torch.no_grad(), span("update", "host", unit.name):
                self.optimizer.update(self.groups, self.kept, self.factor, transfer=self.transfer)
            self.arrived = unit.close(changed=True, after=self.after)
        except BaseException as error:
            self.error = error
        self._let_go()

    def _let_go(self) -> None:
        """Of the gradient: backward may be waiting for its room, and what an error holds on to lives long."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            try:
                transfer.leave()
            except BaseException as error:
                self.error = self.error or error


class ByteBudget:
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


class UpdateQueue:
    """Jobs that wait, each with its place in the next forward."""

    def __init__(self) -> None:
        self._jobs: list[tuple[int, Job]] = []  # in the order in which the device comes to them
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, place: int, job: Job) -> None:
        with self._changed:
            if self._error is not None:
                job.fail(self._error)
                return
            self._jobs.append((place, job))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Nobody does jobs any more: whoever waits for one hears why."""
        with self._changed:
            self._error = error
            while self._jobs:
                self._jobs.pop()[1].fail(error)

    def get(self) -> Job | None:
        """The next job: the first in forward of those that are ready, else the one that will be ready first. None once
        all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            ready = [number for number, (_, job) in enumerate(self._jobs) if job.ready()]
            return self._jobs.pop(min(ready, key=lambda number: self._jobs[number][0], default=0))[1]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def work(line: UpdateQueue, room: ByteBudget, device: torch.device) -> None:
    """The thread that updates."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _work(line)
    except BaseException as error:
        line.fail(error)
        room.give(1 << 60)  # backward may be waiting for it


def _work(line: UpdateQueue) -> None:
    while (job := line.get()) is not None:
        job.run()
        job.done.set()
        if job.error is None:
            try:
                job.optimizer.unit.reap()
                if job.optimizer.unit.image is not None:  # state is on disk because memory is short
                    give_back()
            except BaseException as error:
                job.error = error
        del job  # hold nothing while waiting: a model that is let go of ends this thread
