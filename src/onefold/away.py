"""Updates that run on the host, beside the device.

A unit whose gradient is complete has it parked on the host. Its update is a job: 1 bring master, state and values to
where they are updated  2 update  3 send the values up. One thread does the jobs, those first whose units the next
forward needs first; it prepares the next job before it does one, and what a job sends away travels behind the next. The
kernels it calls use all cores of this rank and leave Python to the thread that trains.

Started inside backward (`step_in_backward`), jobs run beside the backward of earlier units, with so many gradients
parked at once as fit a share of what the host holds. Started by step(), they run beside the next forward, where values
are seen in forward and backward only; else step() waits for them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onefold.comm import Pending
from onefold.engine import Engine
from onefold.errors import OffloadError
from onefold.gradients import Gradients, Parcel
from onefold.native.threads import threads_here
from onefold.slices import NOT_SETTINGS, UnitOptimizer
from onefold.tiers.host import Mark

AHEAD = 2  # jobs prepared before their turn
BEHIND = 1  # jobs whose results may still travel
PARKED_SHARE = 0.04  # of what the host holds: gradients that wait inside backward
LEAST_PARKED = 4
LEAVING = 2  # gradients on their way down before compute may have to wait


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
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.arrived.order()

    def run(self) -> None:
        unit = self.optimizer.unit
        try:
            unit.open()
            with torch.no_grad():
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


class Parking:
    """Takes its place in an engine: gradients of units that are the host's go down. A rehearsal needs no more."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.host = engine, engine.tiers.host
        self._leaving: deque[Gradients] = deque()
        engine.away = self

    def park(self, index: int) -> None:
        """A unit's gradient is complete: it goes down."""
        gradients = self._engine.units[index].gradients
        if gradients.reduced and gradients.parked is None:
            gradients.park()
            self._leaving.append(gradients)
            while len(self._leaving) > (LEAVING if self.host.cuda else 0):
                self._leaving.popleft().left()

    def settle(self) -> None:
        """No update is on the way."""


class Away(Parking):
    """The same, and updates them."""

    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        super().__init__(engine)
        self._by_unit = by_unit
        self._jobs: dict[int, Job] = {}
        self._line = Line()
        self.most_parked = self._most_parked()
        self._room = threading.Semaphore(self.most_parked)
        self._places: dict[int, int] = {}
        if self.host.cuda:  # the cores are idle while the device trains
            threads = threads_here()
            for optimizer in by_unit:
                optimizer.threads = threads
        thread = threading.Thread(
            target=work, args=(self._line, self._room, engine.device), name="onefold updates", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._line, thread)

    def _most_parked(self) -> int:
        """Gradients that may wait on the host inside backward."""
        units = [unit for unit in self._engine.units if unit.away]
        cost = [unit.master.owned.numel * 12 for unit in units]
        return min(len(units), max(LEAST_PARKED, int(PARKED_SHARE * sum(cost)) // self._largest_parcel()))

    def _largest_parcel(self) -> int:
        return max(u.layout.shard_numel * u.dtypes.grad.itemsize for u in self._engine.units if u.away)

    def make_room(self) -> None:
        """For as many gradients as may wait inside backward: how many do is a matter of time, not of the step."""
        self.host.staging.reserve(self.most_parked + AHEAD + BEHIND, self._largest_parcel())

    def park_inside(self, index: int) -> None:
        """The same, where backward waits if the host is behind."""
        self._engine.tiers.turn_to(None)
        self._room.acquire()
        self.park(index)

    def start(
        self, index: int, groups: list[dict[str, Any]], factor: float | Tensor = 1.0, *, inside: bool = False
    ) -> None:
        """Update a unit with these settings; its gradient is parked."""
        engine, unit = self._engine, self._engine.units[index]
        first = engine.first_param[index]
        kept = bytes(engine.kept[first : first + len(unit.params)])
        if not any(kept):
            if inside:
                self._room.release()
            return
        optimizer = self._by_unit[index]
        values = unit.dtypes.master != "fp32" or not optimizer.covers(kept, 0)
        job = Job(
            optimizer, _copied(groups), kept, factor, unit.gradients.parked, self.host.mark(), values, inside=inside
        )
        unit.values.settle()  # two steps without a forward between them
        self._jobs[index] = job
        unit.values.expect(lambda: self._wait(index))
        self._line.put(self._place(index), job)

    def step(self, groups: list[dict[str, Any]], clip: float | Tensor, unscale: float) -> list[Pending]:
        """Update all units that have gradients, those first that the next forward needs first; gathers on the way."""
        engine = self._engine
        engine.tiers.turn_to(None)
        clip = float(clip) if isinstance(clip, Tensor) and clip.is_cuda else clip
        mine = sorted((i for i, unit in enumerate(engine.units) if unit.away), key=self._place)
        for index in mine:
            unit = engine.units[index]
            self.park(index)
            unit.take_edits()
            self.start(index, groups, clip * unscale if unit.dtypes.narrow else unscale)
        gathers = []
        for index in (i for i in mine if not engine.units[i].placement.late):
            gathers += self.finish(index)
        return gathers

    def finish(self, index: int) -> list[Pending]:
        """Wait for one update; what brings it to the other ranks is on the way then."""
        unit = self._engine.units[index]
        unit.values.settle()
        return [unit.values.gather_updated()] if unit.gathers_updated else []

    def _wait(self, index: int) -> None:
        """Until a unit has its new values."""
        job = self._jobs.pop(index, None)
        if job is None:
            return
        try:
            job.wait()
        except BaseException as error:
            unit = self._engine.units[index]
            what = f"the update of {unit.name} failed"
            self._engine.spoilt = f"{what}, so the model holds values of two steps; load a checkpoint"
            if isinstance(error, Exception) and not isinstance(error, OffloadError):
                raise OffloadError(f"the update of {unit.name} on the host failed: {error}") from error
            raise

    def settle(self) -> None:
        """Until all have."""
        for index in sorted(self._jobs, key=self._place):
            self._engine.units[index].values.settle()

    def _place(self, index: int) -> int:
        """When the next forward needs a unit."""
        passes = self._engine.passes
        if len(self._places) != len(passes.units):
            self._places = {id(unit): place for place, unit in enumerate(passes.units)}
        known = self._places.get(id(self._engine.units[index]))
        return index if known is None else passes.gathers.forward.index(known)


def _copied(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings as they are now: a schedule may change them before the job runs."""
    kept = [{key: value for key, value in group.items() if key not in NOT_SETTINGS} for group in groups]
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in kept]


def _end(line: Line, thread: threading.Thread) -> None:
    line.close()
    if thread is not threading.current_thread():
        thread.join()
