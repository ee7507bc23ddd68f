"""The update policy "in backward": each unit is updated as soon as its gradient is reduced, and the gradient is freed.

Every unit has exactly one reduction per step, and the flags that say which of its parameters a rank used are exchanged
beside it. Clipping, accumulation and skipped steps are impossible; each raises with the reason. Units whose optimizer
state is offloaded are updated on the host, beside backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onefold.comm.communicator import Pending
from onefold.comm.meter import Label
from onefold.comm.spans import span
from onefold.errors import StateError
from onefold.optim.host_update import HostUpdates
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.phases import Phase
from onefold.runtime.update_policy import NoUpdates, StepInputs
from onefold.settings.placement import Scope

ASKED = "step_in_backward=True"


class UpdateInBackward(NoUpdates):
    """`groups` gives the optimizer's param groups; `host` updates the units whose optimizer state is offloaded."""

    def __init__(
        self,
        engine: Engine,
        by_unit: Sequence[UnitOptimizer],
        groups: Callable[[], list[dict[str, Any]]],
        host: HostUpdates | None,
    ) -> None:
        self._engine, self._by_unit, self._groups, self.host = engine, by_unit, groups, host
        self._flags: dict[
            int, Callable[[], list[bytes]]
        ] = {}  # of units whose reduction is in flight: waits for every rank's used flags
        self._gathers: list[Pending] = []
        self._awaited: list[int] = []  # units that the host updates before step() returns
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
        return self._engine.phase is Phase.REDUCED

    @property
    def lent_bytes(self) -> int:
        return self.host.budget.total_bytes if self.host is not None else 0

    def reduction_starts(self, index: int) -> None:
        """Starts to exchange which of the unit's parameters each rank used. The parameters change when the reduction
        ends, so the shards of them that peers have posted are received now."""
        engine = self._engine
        first, unit = engine.first_param[index], engine.units[index]
        engine.unsharding.receive_posted(unit)
        used = bytes(engine.used[first : first + len(unit.params)])
        self._flags[index] = engine.everyone.start_gather_bytes(used, Label("used-flags", unit.name))

    @torch.no_grad()
    def reduced(self, index: int, *, final: bool) -> bool:
        """Updates the unit, or queues its host update, and frees its gradient."""
        engine, rows = self._engine, self._flags.pop(index)()
        first, unit = engine.first_param[index], engine.units[index]
        if unit.placement.optimizer is Scope.REPLICATED and not unit.updated_on_host:
            unit.gradients.gather().wait()
        unit.flat_params.finish_posted()  # does not wait: a peer sends its gradients after it has received the shards
        engine.keep(index, bytes(map(max, zip(*rows, strict=True))))
        with unit.update():
            if unit.updated_on_host:
                assert self.host is not None
                self.host.start_in_backward(index, self._groups())
            else:
                with span("update", "inside", unit.name):
                    self._by_unit[index].update(self._groups(), engine.kept, first, 1.0)
        if unit.updated_on_host and not unit.placement.late:
            self._awaited.append(index)
        elif unit.gathers_updated and not unit.updated_on_host:
            self._gathers.append(unit.flat_params.gather_updated())
        unit.gradients.consume()
        return True

    def finish(self) -> None:
        self._engine.schedule.drain()
        for index in self._awaited:
            assert self.host is not None
            self._gathers += self.host.finish(index)
        self._awaited.clear()
        while self._gathers:
            self._gathers.pop().wait()

    def wait(self) -> None:
        if self.host is not None:
            self.host.wait()

    def abandon(self) -> None:
        if self.host is not None:
            self.host.abandon()

    def step(self, inputs: StepInputs) -> None:
        self._engine.forget_used()

    # -- refused calls -----------------------------------------------------------------------------------------------

    def check_backward(self) -> None:
        if self.awaits_step:
            raise StateError(f"{ASKED} updates in every backward: call optimizer.step() before the next one")
        if self._engine.in_full_parameters:
            raise StateError(
                f"{ASKED} would update in a backward inside full_parameters, which would keep the old parameters; "
                f"leave full_parameters first"
            )

    def check_gradient(self, index: int) -> None:
        if self._engine.schedule.started(self._engine.places[index].unit):
            raise StateError(
                f"a gradient of {self._engine.names[index]} came after its unit was updated: with {ASKED} every "
                f"parameter must get its gradient once in one backward (no reentrant checkpoints that share blocks, no "
                f"second backward before step())"
            )

    def check_zero_grad(self) -> None:
        if self.awaits_step:
            raise StateError(f"{ASKED} has updated parameters in backward: call step() before zero_grad()")

    def check_accumulation(self) -> None:
        raise StateError(f"{ASKED} updates in every backward, so nothing can accumulate; leave it out")

    def check_clipping(self) -> None:
        raise StateError(f"{ASKED} has updated each unit by now, so nothing is left to clip; leave it out")
