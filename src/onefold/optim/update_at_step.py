"""The update policy "at step": optimizer.step() updates every unit on the device, from gradients that are complete."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.endpoint import Pending
from onefold.comm.spans import span
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import NoUpdates, StepInputs


class UpdateAtStep(NoUpdates):
    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        self._engine, self._by_unit = engine, by_unit

    def end(self) -> None:
        for optimizer in self._by_unit:
            optimizer.detach()

    def step(self, inputs: StepInputs) -> None:
        for pending in self._update(inputs):
            pending.wait()

    def _update(self, inputs: StepInputs) -> list[Pending]:
        """Updates the units whose state is on the device, in the order of their reductions; the all-gathers of updated
        parameters, which are in flight."""
        engine, gathers = self._engine, []
        for index in engine.schedule.order:
            unit = engine.wait_reduced(index)
            if unit.updated_on_host or not self._by_unit[index].slots:
                continue
            optimizer, factor = self._by_unit[index], inputs.factor(narrow=unit.dtypes.narrow)
            kept = optimizer.kept(engine.used.kept_of(index))
            with span("update", "step", unit.name), unit.update(kept):
                optimizer.update(inputs.groups, kept, factor, inputs.bad)
            if unit.gathers_updated:
                gathers.append(unit.flat_params.gather_updated())
        return gathers
