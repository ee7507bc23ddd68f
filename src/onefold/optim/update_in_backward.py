"""The update policy "in backward": each unit is updated as soon as its gradient is reduced, and the gradient is freed.

Every unit has exactly one reduction per step, and the flags that say which of its parameters a rank used are exchanged
beside it. Clipping, accumulation and skipped steps are impossible; each raises with the reason. Units whose optimizer
state is offloaded are updated on the host, beside backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.spans import span
from onefold.optim.host_update import HostUpdates
from onefold.optim.step_under_way import StepUnderWay
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.phases import Phase
from onefold.runtime.refusals import Call
from onefold.runtime.update_policy import NoUpdates, StepInputs
from onefold.settings.placement import Scope
from onefold.state.unit import Unit

AT_ONCE = 8  # of the units that wait for step(), so many are updated before the memory of their gradients is freed


class UpdateInBackward(NoUpdates):
    """`groups` are the optimizer's param groups, read at each update; `host` updates the units whose optimizer state is
    offloaded."""

    def __init__(
        self,
        engine: Engine,
        by_unit: Sequence[UnitOptimizer],
        groups: list[dict[str, Any]],
        host: HostUpdates | None,
    ) -> None:
        self._engine, self._by_unit, self._groups, self.host = engine, by_unit, groups, host
        self._flags: dict[int, Callable[[], bytes]] = {}  # by unit in flight: waits for every rank
        self._gathers: list[Pending] = []
        self._under_way = StepUnderWay(engine)  # from the first update in backward to step()
        self._abandoning = False  # a load replaces all values: reductions end, and nothing is updated
        self._compared = False  # since the last step: whether ranks have done alike what they must
        self._awaited: list[int] = []  # units that the host updates before step() returns
        self._until_step: list[int] = []  # units that wait for step(): the first step may move their state
        engine.drop_gradients()  # those of another Optimizer's step
        engine.schedule.one_reduction_each()
        for unit in engine.units:
            unit.gradients.make_transient()
        if host is not None:
            host.reserve_buffers(in_backward=True)

    @property
    def keeps_gradients(self) -> bool:
        return False

    @property
    def awaits_step(self) -> bool:
        begun = self._engine.progress.phase is Phase.REDUCTIONS_STARTED or bool(self._until_step)
        return begun and self._engine.broken is None

    @property
    def most_lent_bytes(self) -> int:
        return self.host.budget.total_bytes if self.host is not None else 0

    @property
    def lent_bytes(self) -> int:
        return max(self.host.budget.taken_bytes, 0) if self.host is not None else 0  # below 0 once a worker has died

    def reduction_starts(self, index: int) -> None:
        """Starts to exchange which of the unit's parameters each rank used. The parameters change when the reduction
        ends, so the shards of them that peers have posted are received now."""
        engine, unit = self._engine, self._engine.units[index]
        engine.unsharding.receive_posted(unit)
        used = engine.used.of_unit(index) + (b"" if self._compared else engine.alike.said())
        self._compared = True
        self._flags[index] = engine.everyone.start_all_reduce_max(used, Label("used-flags", unit.name))

    @torch.no_grad()
    def reduced(self, index: int, *, final: bool) -> bool:
        """Updates the unit, or queues its host update, and frees its gradient."""
        unit = self._engine.units[index]
        self._under_way.comes_to(unit)
        with self._under_way:
            try:
                self._end_reduction(index)
            except BaseException:
                if not self._abandoning:
                    self._under_way.misses(unit)
                raise
        return True

    def _end_reduction(self, index: int) -> None:
        engine, unit, heard = self._engine, self._engine.units[index], self._flags.pop(index)()
        if self._abandoning:
            unit.flat_params.finish_posted()
            return
        if said := heard[len(unit.params) :]:  # the first unit of this backward
            self._compared = False
            engine.alike.compare(said)
            self._compared = True
        unit.flat_params.wait_for_update()  # of a step before it, without a forward between them
        unit.flat_params.finish_posted()  # does not wait: a peer sends its gradients after it has received the shards
        engine.used.will_update(index, heard[: len(unit.params)])
        if self._on_host(index) and engine.watch.may_move(index):
            assert self.host is not None
            self.host.offload(index)
            self._until_step.append(index)
        else:
            self._update(index)

    def _update(self, index: int, *, offloaded: bool = False) -> None:
        """Updates a unit from its reduced gradient, or queues its host update, and frees the gradient; a host update
        may find it `offloaded`."""
        unit = self._engine.units[index]
        if not self._on_host(index):
            unit.gradients.bring_back()
            if unit.placement.optimizer is Scope.REPLICATED:
                unit.gradients.gather().wait()
            self._update_unit(index)
            return
        assert self.host is not None
        with unit.update():
            start = self.host.start_offloaded if offloaded else self.host.start_in_backward
            start(index, self._groups)
            self._under_way.writes(unit)
        if not unit.placement.hidden_between_passes:
            self._awaited.append(index)

    def _on_host(self, index: int) -> bool:
        """Whether the host updates a unit, beside backward."""
        return self._engine.units[index].updated_on_host

    def _update_unit(self, index: int) -> None:
        """Updates a unit on the device, and ends its update."""
        unit = self._engine.units[index]
        self._by_unit[index].check_settings(self._groups)
        with unit.update(), span("update", "inside", unit.name):
            self._under_way.writes(unit)
            to_update = self._by_unit[index].to_update(self._engine.used.to_update_of(index))
            with self._by_unit[index].state_there():
                self._by_unit[index].update(self._groups, to_update, 1.0)
        self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        """A unit has been updated on the device: its parameters travel, and its gradient is freed."""
        if unit.gathers_updated:
            self._gathers += unit.gather_updated()
        unit.gradients.consume()

    def finish(self) -> None:
        with self._under_way:
            self._engine.schedule.drain()
            self._finish_updates()
        while self._awaited:  # an interrupt here breaks nothing: the updates go on, and step() can be called again
            assert self.host is not None
            self._gathers += self.host.finish(self._awaited[0])
            self._awaited.pop(0)
        with self._under_way:
            self._wait_for_gathers()

    def _wait_for_gathers(self) -> None:
        while self._gathers:
            self._gathers.pop().wait()

    def _finish_updates(self) -> None:
        """Ends updates on the device that `_update_unit` has begun."""

    def wait(self) -> None:
        if self.host is not None:
            self.host.wait()

    def abandon(self) -> None:
        """Ends a backward that raised, without updates, and forgets what of it is left to do."""
        if self._engine.progress.phase is not Phase.IDLE:
            self._abandoning = True
            try:
                self._engine.complete_gradients(Call.STEP)
            finally:
                self._abandoning = False
            self._engine.forget_used()
        self._awaited.clear()
        self._until_step.clear()
        self._wait_for_gathers()
        self._compared = False
        self._under_way.ended()
        if self.host is not None:
            self.host.abandon()

    def end(self) -> None:
        self._engine.schedule.one_reduction_each(False)
        for unit, optimizer in zip(self._engine.units, self._by_unit, strict=True):
            unit.gradients.make_transient(False)
            optimizer.detach()

    def follow_placement(self, moved: Sequence[int]) -> None:
        if self.host is not None:
            self.host.follow_placement(moved, in_backward=True)

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> None:
        for index in self._until_step:
            self._engine.units[index].flat_params.check_no_user_writes()  # may raise: before any unit is updated
        waited = bool(self._until_step)
        while self._until_step:
            assert self.host is not None
            with self._under_way:
                for _ in range(min(AT_ONCE, len(self._until_step))):
                    index = self._until_step.pop(0)
                    self._under_way.comes_to(self._engine.units[index])
                    self._update(index, offloaded=True)
            self.host.end_waiting(last=not self._until_step)  # after an interrupt here step() can be called again
        if waited or self._awaited:
            self.finish()
        self._under_way.ended()
        self._compared = False
        self._engine.forget_used()
