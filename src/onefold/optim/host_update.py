"""Host updates: the optimizer runs on the CPU, beside the device, for units whose state is on the host or on disk.

The update of a unit is a job: 1 load gradient, master, optimizer state and parameters into host memory  2 update
3 copy the parameters to the device. A few threads run the jobs (workers.py). The kernels they call use the cores of
this rank and release the GIL, so the training thread goes on.

Started in backward (`step_in_backward`), jobs run beside the backward of earlier units and beside the next forward. A
gradient waits for its job on the device, in memory that activations have freed; backward waits when too many do.
Started by step(), because clipping needs all gradients first, jobs read gradients that were offloaded during backward.
They run beside the next forward where parameters may be hidden until then; elsewhere step() waits for them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from onefold.comm.endpoint import Pending
from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.cost.limits import COPYING, UNITS_AHEAD, WORKERS, waiting_bytes
from onefold.errors import OffloadError
from onefold.offload.transfer import GradientTransfer
from onefold.optim.kernels.threads import threads_here
from onefold.optim.prepared import Assumed, InPlaceUpdate, KeptUpdate, PreparedUpdates, settings_of
from onefold.optim.step_under_way import StepUnderWay
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.workers import ByteBudget, Job, UpdateQueue, work
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Situation
from onefold.runtime.update_policy import StepInputs
from onefold.settings.offload import Offload
from onefold.settings.placement import Scope
from onefold.state.gradient_state import GradientState
from onefold.state.gradients import Gradients

SPARE_CORES = 4  # left to the training threads


class HostGradients:
    """Offloads the reduced gradients of units that the host updates."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.host = engine, engine.tiers.host
        self._leaving: deque[Gradients] = deque()

    def on_reduced(self, index: int, *, final: bool) -> bool:
        """Starts to offload a unit's gradient after its `final` reduction. True if the host updates the unit."""
        mine = final and self._engine.units[index].updated_on_host
        if mine:
            self.offload(index)
        return mine

    def offload(self, index: int) -> None:
        """Starts to copy a unit's reduced gradient to the host, unless it is there."""
        gradients = self._engine.units[index].gradients
        if gradients.state is GradientState.REDUCED:
            gradients.offload()
            self._leaving.append(gradients)
            while len(self._leaving) > (0 if self._engine.pool.keeps else COPYING):  # on a CPU a copy is done at once
                self._leaving.popleft().left()


class Reduced(NamedTuple):
    """An event after a unit's backward, and how often its shard had been read for use until then."""

    event: StreamEvent
    reads: int


class HostUpdates(HostGradients):
    """Runs the optimizer on the host, in a few threads, for units whose optimizer state is offloaded."""

    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        super().__init__(engine)
        self._by_unit = by_unit
        self._jobs: dict[int, Job] = {}
        self.queue = UpdateQueue()
        spare_bytes = Offload.of(engine.resolved.settings.offload).spare_bytes
        self.prepared = PreparedUpdates(engine, by_unit, self.queue, spare_bytes)
        self.budget = ByteBudget(waiting_bytes(self._device_bytes()))
        self._positions: dict[int, int] = {}
        self._reduced: dict[int, Reduced] = {}  # units of this backward, in the order of their gradients
        self._backward_events: deque[StreamEvent] = deque()  # after each of the last units whose gradients are complete
        self._reserved = False
        if self.host.cuda:  # the cores are idle while the device trains
            cores = threads_here()
            for optimizer in by_unit:
                optimizer.threads = cores - SPARE_CORES if cores > 2 * SPARE_CORES else cores
        jobs = (self.queue, self.budget, engine.device)
        threads = [
            threading.Thread(target=work, args=jobs, name="onefold updates", daemon=True) for _ in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, self.queue, threads)

    def _transfer_bytes(self) -> list[int]:
        """Bytes of each gradient shard that is copied to the host, the last unit's first."""
        units = [unit for unit in reversed(self._engine.units) if unit.updated_on_host]
        return [unit.layout.shard_numel * unit.dtypes.grad.itemsize for unit in units]

    def _device_bytes(self) -> list[int]:
        """Bytes that each of those gradients takes on the device until it is copied, the last unit's first."""
        return [unit.gradients.held_bytes for unit in reversed(self._engine.units) if unit.updated_on_host]

    def _parameter_bytes(self) -> list[int]:
        """Bytes of each unit's parameters that are copied to the host to be updated."""
        units = [unit for unit in self._engine.units if unit.updated_on_host and not unit.flat_params.on_host]
        return [unit.master.owned.numel * unit.flat_params.dtype.itemsize for unit in units]

    def reserve_buffers(self, *, in_backward: bool = False) -> None:
        """Allocates the buffers of all jobs that may run at once, and in backward those of gradients that wait: how
        many wait depends on timing, and memory must not."""
        self._reserved = True
        if in_backward:
            left = self.budget.total_bytes + max(self._device_bytes(), default=0)  # backward fills one more
            for nbytes in self._device_bytes():
                if nbytes <= left:
                    self.host.waiting.reserve(nbytes)
                    left -= nbytes
        for nbytes in self._under_way_bytes(in_backward):
            self.host.staging.reserve(nbytes)

    def _under_way_bytes(self, in_backward: bool) -> list[int]:
        """Sizes of the transfer buffers of all jobs that may run at once."""
        gradients = sorted(self._transfer_bytes())[-WORKERS:] if in_backward else []
        return sorted(self._parameter_bytes())[-WORKERS:] + gradients

    def end_waiting(self, *, last: bool) -> None:
        """Waits for the updates that were started, and frees the buffers in which their gradients waited for the end of
        the first step: in later steps gradients wait on the device. After the `last` ones buffers are as reserved."""
        self.wait()
        if not last:
            self.host.staging.trim(sum(self._under_way_bytes(in_backward=True)))
            return
        for unit in self._engine.units:
            unit.wait_stored()
        self.host.staging.trim()
        for nbytes in self._under_way_bytes(in_backward=True):
            self.host.staging.reserve(nbytes)

    def start_in_backward(self, index: int, groups: list[dict[str, Any]]) -> None:
        """Queues the update of a unit whose gradient is complete; waits while too many gradients are queued."""
        self._engine.tiers.load_for_reading(None)
        unit, budget = self._engine.units[index], self.budget
        unit.flat_params.check_no_user_writes()
        nbytes = unit.gradients.held_bytes
        with span("wait", "room", unit.name):
            budget.take(nbytes)
        self._start(index, groups, 1.0, unit.gradients.lend(lambda: budget.give(nbytes)))

    def start_offloaded(self, index: int, groups: list[dict[str, Any]]) -> None:
        """Queues the update of a unit whose complete gradient is on the host, and leaves the gradient to it."""
        self._engine.tiers.load_for_reading(None)
        gradients = self._engine.units[index].gradients
        self._engine.units[index].flat_params.check_no_user_writes()
        self._start(index, groups, 1.0, gradients.offloaded)
        gradients.drop()

    def follow_placement(self, moved: Sequence[int], *, in_backward: bool) -> None:
        """The optimizer state of these units is on other tiers now: buffers are those that host updates need now."""
        self.prepared.release(moved)
        self.budget.total_bytes = waiting_bytes(self._device_bytes())
        for index in moved:  # complete gradients leave first, so that their buffers are freed too
            if self._engine.units[index].updated_on_host:
                self.offload(index)
        for pool in (self._engine.pool, self.host.waiting, self.host.staging, self.host.scratch):
            pool.trim()
        if in_backward:
            self.reserve_buffers(in_backward=True)
        self._reserved = in_backward

    def _start(
        self, index: int, groups: list[dict[str, Any]], factor: float | Tensor, transfer: GradientTransfer | None
    ) -> None:
        """Queues the update of a unit with these param groups and this gradient."""
        engine, unit = self._engine, self._engine.units[index]
        optimizer = self._by_unit[index]
        to_update = optimizer.to_update(engine.used.to_update_of(index))
        if not any(to_update):
            return
        written = unit.dtypes.master == "fp32" and optimizer.writes_all(to_update)
        load_parameters = unit.may_be_edited or not written  # an edit is found by comparing them with the master
        settings = settings_of(groups)
        prepared = self.prepared.take(index, Assumed(settings, to_update, float(factor), transfer))
        unit.flat_params.wait_for_update()  # two steps without a forward between them
        after = load_after = self.host.record_event()
        reduced, hidden = self._reduced.pop(index, None), unit.placement.parameters is Scope.SHARDED
        if reduced is not None and hidden and not (unit.may_be_edited or unit.flat_params.on_host):
            load_after = reduced.event
            if reduced.reads == unit.flat_params.reads:  # no forward was between backward and step()
                after = reduced.event
        elif reduced is not None and prepared is not None:  # on one rank users see parameters, but may not write them
            load_after = reduced.event
        make: Callable[..., Job] = Job
        if prepared is not None:
            make = partial(KeptUpdate if prepared.started else InPlaceUpdate, prepared=prepared)
        job = make(optimizer, settings, to_update, factor, transfer, after, load_parameters, load_after)
        unit.flat_params.hide_until_updated(lambda: self._wait(index), job.done.is_set)
        self._jobs[index] = job
        self.queue.put(self._forward_position(index), job)

    def prepare(self, index: int, groups: list[dict[str, Any]]) -> None:
        """Updates a unit in spare memory before step(), if step() is expected to use its gradient as it is."""
        self._reduced.pop(index, None)
        self._reduced[index] = Reduced(self.host.record_event(), self._engine.units[index].flat_params.reads)
        if self._by_unit[index].slots:
            self.prepared.start(index, groups, self._forward_position(index))

    def limit_run_ahead(self) -> None:
        """Called in backward when the gradients of a unit are complete: blocks the host until the device has run the
        backward of all but the last UNITS_AHEAD units. Otherwise the CUDA launch queue fills up; launches then block,
        some while holding the GIL, and no update thread runs."""
        self._backward_events.append(self.host.record_event())
        if len(self._backward_events) > UNITS_AHEAD:
            self._backward_events.popleft().wait()

    def forget_prepared(self) -> None:
        """Parameters, optimizer state or settings may change before step(): updates begin from what is there then."""
        self.prepared.forget()
        self._reduced.clear()

    def step(self, inputs: StepInputs, under_way: StepUnderWay) -> list[Pending]:
        """Queues the updates of all units, and waits for those that the next forward may not overlap; all-gathers of
        their parameters, which are in flight. Units whose gradients are there come in the order of the next forward,
        the others in that of their gradients."""
        engine = self._engine
        engine.tiers.load_for_reading(None)
        if not self._reserved:
            self.reserve_buffers()
        clip = inputs.clip
        inputs = inputs._replace(clip=float(clip) if isinstance(clip, Tensor) and clip.is_cuda else clip)
        self.prepared.expect(float(clip) == 1.0)
        mine = [i for i, unit in enumerate(engine.units) if unit.updated_on_host and self._by_unit[i].slots]
        gradients = {index: place for place, index in enumerate(self._reduced)}
        late = {index for index in mine if not _is_there(engine.units[index].gradients.offloaded)}
        mine.sort(
            key=lambda index: (index in late, gradients.get(index, 0) * (index in late), self._forward_position(index))
        )
        for index in mine:
            engine.units[index].flat_params.check_no_user_writes()  # may raise: before any unit is updated
        for index in mine:
            unit = engine.units[index]
            under_way.comes_to(unit)
            self.offload(index)
            with unit.update(self._by_unit[index].to_update(engine.used.to_update_of(index))):
                under_way.writes(unit)
                self._start(index, inputs.groups, inputs.factor(narrow=unit.dtypes.narrow), unit.gradients.offloaded)
        gathers = []
        for index in (i for i in mine if not engine.units[i].placement.hidden_between_passes):
            gathers += self.finish(index)
        return gathers

    def finish(self, index: int) -> list[Pending]:
        """Waits for the update of a unit, and starts the all-gather that replicated parameters need then."""
        unit = self._engine.units[index]
        unit.flat_params.wait_for_update()
        return unit.gather_updated() if unit.gathers_updated else []

    def _wait(self, index: int) -> None:
        """Waits for the update of a unit, and raises its error. After a KeyboardInterrupt the update goes on, and the
        next call waits again."""
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
        """Ends all updates before a load replaces every parameter; their errors no longer matter."""
        self._engine.schedule.drain()
        self.forget_prepared()
        self.wait(ignore_errors=True)

    def wait(self, *, ignore_errors: bool = False) -> None:
        """Waits until every queued host update has finished, and raises the error of one that failed."""
        for index in sorted(self._jobs, key=self._forward_position):
            try:
                self._engine.units[index].flat_params.wait_for_update()
            except OffloadError:
                if not ignore_errors:
                    raise

    def _forward_position(self, index: int) -> int:
        """A unit's position in the order in which the next forward uses units."""
        unsharding = self._engine.unsharding
        if len(self._positions) != len(unsharding.units):
            self._positions = {id(unit): place for place, unit in enumerate(unsharding.units)}
        known = self._positions.get(id(self._engine.units[index]))
        return index if known is None else unsharding.gathers.forward.index(known)


class UpdateOnHost(UpdateAtStep):
    """The update policy where the optimizer state of some units is offloaded: step() queues their host updates."""

    def __init__(
        self, engine: Engine, by_unit: Sequence[UnitOptimizer], host: HostUpdates, groups: list[dict[str, Any]]
    ) -> None:
        super().__init__(engine, by_unit)
        self.host, self._groups = host, groups

    def reduction_starts(self, index: int) -> None:
        super().reduction_starts(index)
        self.host.limit_run_ahead()

    def reduced(self, index: int, *, final: bool) -> bool:
        mine = self.host.on_reduced(index, final=final)
        if mine:
            self.host.prepare(index, self._groups)
        return mine

    def _update(self, inputs: StepInputs) -> None:
        super()._update(inputs)
        self._gathers += self.host.step(inputs, self._under_way)

    def wait(self) -> None:
        self.host.wait()

    def abandon(self) -> None:
        super().abandon()
        self.host.abandon()

    def forget_prepared(self) -> None:
        self.host.forget_prepared()

    def follow_placement(self, moved: Sequence[int]) -> None:
        self.host.follow_placement(moved, in_backward=False)

    @property
    def spare(self) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        return self.host.prepared.tensors()


def _is_there(transfer: GradientTransfer | None) -> bool:
    """Whether a gradient has been copied to the host, or is not on its way there."""
    return transfer is None or transfer.copied.query()


def _end(queue: UpdateQueue, threads: Sequence[threading.Thread]) -> None:
    queue.close()
    if threading.current_thread() not in threads:  # a worker thread may free the model, and cannot join itself
        for thread in threads:
            thread.join()
