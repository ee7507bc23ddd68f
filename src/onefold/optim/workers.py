"""The threads that run host updates, and the queue of their jobs: among jobs whose gradient is ready, the one whose
unit the next forward uses first.

While one thread is inside an update kernel, which uses the cores and not the GIL, the others load what their jobs need,
or store results.

In backward the host queues jobs far ahead of the device, and the unit that the next forward uses first gets its
gradient last. So a job is not taken before the device has computed its gradient, as long as other jobs are ready.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from onefold.comm.spans import NOTHING, span
from onefold.comm.streams import StreamEvent
from onefold.offload.host_memory import trim_heap
from onefold.offload.numa import near
from onefold.offload.transfer import GradientTransfer
from onefold.optim.unit_optimizer import UnitOptimizer


@dataclass
class Job:
    """The host update of one unit."""

    optimizer: UnitOptimizer
    groups: list[dict[str, Any]]
    to_update: bytes  # a flag for each of the unit's parameters: whether it is updated
    factor: float | Tensor
    transfer: GradientTransfer | None
    after: StreamEvent  # after it the device reads the old parameters no more
    load_parameters: bool  # False: the update writes every element, so the old parameters are not needed
    load_after: StreamEvent  # after it the device has the parameters that are to be updated
    buffer: Tensor | None = None  # for the parameters; None: take one from the pool
    done: threading.Event = field(default_factory=threading.Event)
    uploaded: StreamEvent = field(default_factory=StreamEvent)
    error: BaseException | None = None

    def ready(self) -> bool:
        """Whether the device has done what the update waits for."""
        return self.load_after.query() and (self.transfer is None or self.transfer.copied.query())

    def wait(self) -> None:
        """Waits until the job is done, raises its error, and makes the current stream wait for the new parameters."""
        with NOTHING if self.done.is_set() else span("wait", "update", self.optimizer.unit.name):
            self.done.wait()
        if self.error is not None:
            raise self.error
        self.uploaded.stream_wait()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._release_gradient()
        self.done.set()

    def run(self) -> None:
        unit = self.optimizer.unit
        try:
            unit.start_load(self.load_after, parameters=self.load_parameters, into=self.buffer)
            if self.transfer is not None:
                self.transfer.start_copy()
            unit.finish_load()
            with torch.no_grad(), span("update", "host", unit.name):
                self.optimizer.update(self.groups, self.to_update, self.factor, transfer=self.transfer)
            self.uploaded = unit.store(changed=True, after=self.after)
        except BaseException as error:
            self.error = error
        self._release_gradient()

    def finish(self) -> None:
        """Waits until what was stored is where it belongs; after `run`, when others may use the parameters already."""
        self.optimizer.unit.wait_stored()
        if self.optimizer.unit.image is not None:  # state is on disk because memory is short
            trim_heap()

    def _release_gradient(self) -> None:
        """Frees the gradient's buffers: backward may be waiting for them, and a job that failed may live long."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            try:
                transfer.release_source()
            except BaseException as error:
                self.error = self.error or error


class ByteBudget:
    """A number of bytes that may be taken at once; `take` waits until others have given enough back."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.taken_bytes <= 0 or self.taken_bytes + nbytes <= self.total_bytes)
            self.taken_bytes += nbytes

    def give(self, nbytes: int) -> None:
        if nbytes:
            with self._changed:
                self.taken_bytes -= nbytes
                self._changed.notify_all()


class Work(Protocol):
    """What a worker thread runs."""

    done: threading.Event
    error: BaseException | None

    def ready(self) -> bool: ...
    def run(self) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class UpdateQueue:
    """Jobs that wait for a thread, each with its unit's position in the next forward."""

    def __init__(self) -> None:
        self._jobs: list[tuple[int, Work]] = []  # in the order of their gradients on the device
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, place: int, job: Work) -> None:
        with self._changed:
            if self._error is not None:
                job.fail(self._error)
                return
            self._jobs.append((place, job))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Fails all jobs, now and from now on, because a worker thread died of this error."""
        with self._changed:
            self._error = error
            while self._jobs:
                self._jobs.pop()[1].fail(error)

    def remove(self, job: Work) -> bool:
        """Takes a job back; False if a thread has taken it."""
        with self._changed:
            left = [row for row in self._jobs if row[1] is not job]
            found, self._jobs = len(left) < len(self._jobs), left
            return found

    def get(self) -> Work | None:
        """Waits for a job and takes it: the first in forward order among those that are ready, else the one that will
        be ready first. None once the queue is closed."""
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


def work(queue: UpdateQueue, budget: ByteBudget, device: torch.device) -> None:
    """The main function of a worker thread."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if node := near(torch.cuda.current_device()):
                node.run_here()
        _work(queue)
    except BaseException as error:
        queue.fail(error)
        budget.give(1 << 60)  # backward may be waiting for bytes that no job will give back


def _work(queue: UpdateQueue) -> None:
    while (job := queue.get()) is not None:
        job.run()
        job.done.set()
        if job.error is None:
            try:
                job.finish()
            except BaseException as error:
                job.error = error
        del job  # hold no model while waiting: freeing the model ends this thread
