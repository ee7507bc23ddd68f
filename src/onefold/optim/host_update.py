"""Updates that run on the host, beside the device.

The update of a unit is a job: 1 bring gradient, master, state and values to where they are updated  2 update  3 send
the values up. A few threads do the jobs (workers.py). The kernels they call use the cores of this rank and leave Python
to the thread that trains.

Started inside backward (`step_in_backward`), jobs run beside the backward of earlier units and beside the next forward.
A gradient waits for its job on the device, in memory that activations have left; backward waits where too many do.
Updates that step() starts, after a norm that needs all gradients, find gradients offloaded to the host; jobs run beside
the next forward where parameters are seen in forward and backward only, else step() waits for them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onefold.comm.communicator import Pending
from onefold.comm.spans import span
from onefold.cost.limits import LEAVING, WORKERS, waiting_bytes
from onefold.errors import OffloadError
from onefold.offload.transfer import GradientTransfer
from onefold.optim.kernels.threads import threads_here
from onefold.optim.unit_optimizer import NOT_SETTINGS, UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.workers import ByteBudget, Job, UpdateQueue, work
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Situation
from onefold.runtime.update_policy import StepInputs
from onefold.state.gradient_state import GradientState
from onefold.state.gradients import Gradients

SPARED = 4  # cores for the threads that train


class HostGradients:
    """Sends the gradients of units that the host updates to the host."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.host = engine, engine.tiers.host
        self._leaving: deque[Gradients] = deque()

    def take(self, index: int, *, final: bool) -> bool:
        """A unit's gradient is reduced. True if it is complete and the host updates the unit: then it is offloaded."""
        mine = final and self._engine.units[index].updated_on_host
        if mine:
            self.offload(index)
        return mine

    def offload(self, index: int) -> None:
        """Send a unit's complete gradient to the host, unless it is there."""
        gradients = self._engine.units[index].gradients
        if gradients.state is GradientState.REDUCED:
            gradients.offload()
            self._leaving.append(gradients)
            while len(self._leaving) > (0 if self._engine.pool.keeps else LEAVING):  # on a CPU a copy is done at once
                self._leaving.popleft().left()


class HostUpdates(HostGradients):
    """Runs the optimizer on the host for units whose optimizer state is there. A few threads do it."""

    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        super().__init__(engine)
        self._by_unit = by_unit
        self._jobs: dict[int, Job] = {}
        self._line = UpdateQueue()
        self.room = ByteBudget(waiting_bytes(self._held()))
        self._places: dict[int, int] = {}
        self._roomy = False
        if self.host.cuda:  # the cores are idle while the device trains
            cores = threads_here()
            for optimizer in by_unit:
                optimizer.threads = cores - SPARED if cores > 2 * SPARED else cores
        jobs = (self._line, self.room, engine.device)
        threads = [
            threading.Thread(target=work, args=jobs, name="onefold updates", daemon=True) for _ in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, self._line, threads)

    def _transfers(self) -> list[int]:
        """Bytes of the gradients that go to the host, the last unit's first."""
        units = [unit for unit in reversed(self._engine.units) if unit.updated_on_host]
        return [unit.layout.shard_numel * unit.dtypes.grad.itemsize for unit in units]

    def _held(self) -> list[int]:
        """Bytes on the device of the gradients that go to the host, as long as they wait there."""
        return [unit.gradients.held_bytes for unit in reversed(self._engine.units) if unit.updated_on_host]

    def _values(self) -> list[int]:
        """Bytes of parameters that come to the host to be updated."""
        units = [unit for unit in self._engine.units if unit.updated_on_host and not unit.flat_params.on_host]
        return [unit.master.owned.numel * unit.flat_params.dtype.itemsize for unit in units]

    def make_room(self, *, in_backward: bool = False) -> None:
        """For all that may be under way at once, and in backward for gradients that wait: how many do is a matter of
        time, not of the step."""
        self._roomy = True
        under_way = sorted(self._values())[-WORKERS:]
        if in_backward:
            under_way += sorted(self._transfers())[-WORKERS:]
            left = self.room.total_bytes + max(self._held(), default=0)  # backward has one more
            for nbytes in self._held():
                if nbytes <= left:
                    self.host.waiting.reserve(nbytes)
                    left -= nbytes
        for nbytes in under_way:
            self.host.staging.reserve(nbytes)

    def start_in_backward(self, index: int, groups: list[dict[str, Any]]) -> None:
        """Update a unit whose gradient is complete; backward waits if the host is behind."""
        self._engine.tiers.turn_to(None)
        unit, room = self._engine.units[index], self.room
        unit.flat_params.check_unwritten()
        nbytes = unit.gradients.held_bytes
        with span("wait", "room", unit.name):
            room.take(nbytes)
        self._start(index, groups, 1.0, unit.gradients.lend(lambda: room.give(nbytes)))

    def _start(
        self, index: int, groups: list[dict[str, Any]], factor: float | Tensor, transfer: GradientTransfer | None
    ) -> None:
        """Update a unit with these settings and this gradient."""
        engine, unit = self._engine, self._engine.units[index]
        kept = bytes(engine.used.kept_of(index))
        if not any(kept):
            return
        optimizer = self._by_unit[index]
        values = unit.dtypes.master != "fp32" or not optimizer.covers(kept)
        job = Job(optimizer, _copied(groups), kept, factor, transfer, self.host.mark(), values)
        unit.flat_params.wait_for_update()  # two steps without a forward between them
        unit.flat_params.expect(lambda: self._wait(index), job.done.is_set)
        self._jobs[index] = job
        self._line.put(self._place(index), job)

    def step(self, inputs: StepInputs) -> list[Pending]:
        """Update all units that have gradients, those first that the next forward needs first; gathers on the way."""
        engine = self._engine
        engine.tiers.turn_to(None)
        if not self._roomy:
            self.make_room()
        clip = inputs.clip
        inputs = inputs._replace(clip=float(clip) if isinstance(clip, Tensor) and clip.is_cuda else clip)
        mine = sorted((i for i, unit in enumerate(engine.units) if unit.updated_on_host), key=self._place)
        for index in mine:
            engine.units[index].flat_params.check_unwritten()  # before any is updated
        for index in mine:
            unit = engine.units[index]
            self.offload(index)
            with unit.update(engine.used.kept_of(index)):
                self._start(index, inputs.groups, inputs.factor(narrow=unit.dtypes.narrow), unit.gradients.offloaded)
        gathers = []
        for index in (i for i in mine if not engine.units[i].placement.late):
            gathers += self.finish(index)
        return gathers

    def finish(self, index: int) -> list[Pending]:
        """Wait for one update; what brings it to the other ranks is on the way then."""
        unit = self._engine.units[index]
        unit.flat_params.wait_for_update()
        return [unit.flat_params.gather_updated()] if unit.gathers_updated else []

    def _wait(self, index: int) -> None:
        """Wait until a unit has its new values. After an interrupted wait the update goes on."""
        job = self._jobs.get(index)
        if job is None:
            return
        try:
            job.wait()
            del self._jobs[index]
        except BaseException as error:
            if error is not job.error:
                raise
            del self._jobs[index]
            unit = self._engine.units[index]
            self._engine.mark_broken(Situation.UPDATE_FAILED, unit.name)
            if isinstance(error, Exception) and not isinstance(error, OffloadError):
                raise OffloadError(f"the update of {unit.name} on the host failed: {error}") from error
            raise

    def abandon(self) -> None:
        """Every value is about to be replaced: end updates, also those that failed, which has been heard."""
        self._engine.schedule.drain()
        self.wait(heard=True)

    def wait(self, *, heard: bool = False) -> None:
        """Wait until every queued host update has finished; an update that failed raises, unless that was heard."""
        for index in sorted(self._jobs, key=self._place):
            try:
                self._engine.units[index].flat_params.wait_for_update()
            except OffloadError:
                if not heard:
                    raise

    def _place(self, index: int) -> int:
        """When the next forward needs a unit."""
        unsharding = self._engine.unsharding
        if len(self._places) != len(unsharding.units):
            self._places = {id(unit): place for place, unit in enumerate(unsharding.units)}
        known = self._places.get(id(self._engine.units[index]))
        return index if known is None else unsharding.gathers.forward.index(known)


class UpdateOnHost(UpdateAtStep):
    """The policy where the optimizer state of some units is on the host: step() starts their updates there."""

    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer], host: HostUpdates) -> None:
        super().__init__(engine, by_unit)
        self._host = host

    def reduced(self, index: int, *, final: bool) -> bool:
        return self._host.take(index, final=final)

    def step(self, inputs: StepInputs) -> None:
        for pending in [*self._update(inputs), *self._host.step(inputs)]:
            pending.wait()

    def wait(self) -> None:
        self._host.wait()

    def abandon(self) -> None:
        self._host.abandon()


def _copied(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings as they are now: a schedule may change them before the job runs."""
    kept = [{key: value for key, value in group.items() if key not in NOT_SETTINGS} for group in groups]
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in kept]


def _end(line: UpdateQueue, threads: Sequence[threading.Thread]) -> None:
    line.close()
    if threading.current_thread() not in threads:  # else Python lets go of a model inside one of them: both end soon
        for thread in threads:
            thread.join()
