"""Updates at step(): gradients are complete, clipped or unscaled, and then every unit is updated on the device."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.communicator import Pending
from onefold.comm.spans import span
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import NoUpdates, StepInputs


class UpdateAtStep(NoUpdates):
    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        self._engine, self._by_unit = engine, by_unit

    def step(self, inputs: StepInputs) -> None:
        for pending in self._update(inputs):
            pending.wait()

    def _update(self, inputs: StepInputs) -> list[Pending]:
        """Update units in the order of their reductions; the all-gathers of new values, which are in flight."""
        engine, gathers = self._engine, []
        for index in engine.schedule.order:
            unit = engine.wait_reduced(index)
            if unit.updated_on_host:
                continue
            factor, kept = inputs.factor(narrow=unit.dtypes.narrow), engine.used.kept_of(index)
            with span("update", "step", unit.name), unit.update(kept):
                self._by_unit[index].update(inputs.groups, kept, factor, inputs.bad)
            if unit.gathers_updated:
                gathers.append(unit.flat_params.gather_updated())
        return gathers
