"""The update policy "at step": optimizer.step() updates every unit on the device, from gradients that are complete."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.endpoint import Pending
from onefold.comm.spans import span
from onefold.optim.step_under_way import StepUnderWay
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import NoUpdates, StepInputs


class UpdateAtStep(NoUpdates):
    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer]) -> None:
        self._engine, self._by_unit = engine, by_unit
        self._under_way = StepUnderWay(engine)
        self._gathers: list[Pending] = []  # of updated parameters, which are in flight

    def end(self) -> None:
        for optimizer in self._by_unit:
            optimizer.detach()

    def step(self, inputs: StepInputs) -> None:
        for optimizer in self._by_unit:
            optimizer.check_settings(inputs.groups)  # may raise: before any unit is updated
        with self._under_way:
            self._update(inputs)
            self._wait_for_gathers()
        self._under_way.ended()

    def _wait_for_gathers(self) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()

    def abandon(self) -> None:
        self._wait_for_gathers()  # a load is about to write where they do
        self._under_way.ended()

    def _update(self, inputs: StepInputs) -> None:
        """Updates the units whose state is on the device, in the order of their reductions, or of the next forward if
        it may overlap the all-gathers of updated parameters; those that it may not overlap are in flight then."""
        engine = self._engine
        order = engine.schedule.order
        overlaps = any(engine.units[index].placement.hidden_between_passes for index in order)
        for index in reversed(order) if overlaps else order:
            self._under_way.comes_to(engine.units[index])
            unit = engine.wait_reduced(index)
            if unit.updated_on_host or not self._by_unit[index].slots:
                continue
            unit.flat_params.wait_for_update()  # of a step before, without a forward between them
            unit.gradients.bring_back()
            optimizer, factor = self._by_unit[index], inputs.factor(narrow=unit.dtypes.narrow)
            to_update = optimizer.to_update(engine.used.to_update_of(index))
            with span("update", "step", unit.name), unit.update(to_update):
                self._under_way.writes(unit)
                optimizer.update(inputs.groups, to_update, factor, inputs.bad)
            if unit.gathers_updated:
                self._gathers += unit.gather_updated()
