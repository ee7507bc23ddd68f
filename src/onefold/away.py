"""Updates that run on the host, beside the device.

A unit whose gradient is complete has it parked on the host. Its update is a job: 1 bring master, state and values to
where they are updated  2 update  3 send the values up. One thread does the jobs (jobs.py). The kernels it calls use all
cores of this rank and leave Python to the thread that trains.

Started inside backward (`step_in_backward`), jobs run beside the backward of earlier units, with so many gradients
parked at once as fit a share of what the host holds. Started by step(), they run beside the next forward, where values
are seen in forward and backward only; else step() waits for them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onefold.comm import Pending
from onefold.engine import Engine
from onefold.errors import OffloadError
from onefold.gradients import Gradients
from onefold.jobs import AHEAD, BEHIND, Job, Line, work
from onefold.native.threads import threads_here
from onefold.slices import NOT_SETTINGS, UnitOptimizer
from onefold.spans import span

PARKED_SHARE = 0.04  # of what the host holds: gradients that wait inside backward
LEAST_PARKED = 4
LEAVING = 2  # gradients on their way down before compute may have to wait


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
        with span("wait", "room", self._engine.units[index].name):
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
