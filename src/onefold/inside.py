"""Updates inside backward: each unit as soon as its gradient is reduced, so that no gradients are held.

A unit then has one round only, whatever it waits for, and what ranks used of it travels beside that round. Nothing can
be clipped, accumulated or skipped; each of those is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from onefold.comm import Pending
from onefold.engine import Engine
from onefold.errors import StateError
from onefold.meter import Label
from onefold.placement import Scope
from onefold.slices import UnitOptimizer
from onefold.spans import span

ASKED = "step_in_backward=True"


class InsideUpdates:
    """Takes its place in an engine and updates its units."""

    def __init__(
        self, engine: Engine, by_unit: Sequence[UnitOptimizer], groups: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._engine, self._by_unit, self._groups = engine, by_unit, groups
        self._flags: dict[int, Callable[[], list[bytes]]] = {}  # who used what of a unit whose round is on the way
        self._gathers: list[Pending] = []
        self._awaited: list[int] = []  # units that the host updates before step() returns
        engine.inside, engine.schedule.patient = self, True
        for unit in engine.units:
            unit.gradients.transient = True
        if engine.away:
            engine.away.make_room()

    def starting(self, index: int) -> None:
        """A round starts: ranks tell each other what they used of its unit. Its values change when it ends, so what
        peers offer of them is taken now."""
        engine = self._engine
        first, unit = engine.first_param[index], engine.units[index]
        engine.passes.take(unit)
        used = bytes(engine.used[first : first + len(unit.params)])
        self._flags[index] = engine.everyone.start_bytes(used, Label("used-flags", unit.name))

    @torch.no_grad()
    def reduced(self, index: int) -> None:
        """A round has ended: update its unit and let its gradient go."""
        engine, rows = self._engine, self._flags.pop(index)()
        first, unit = engine.first_param[index], engine.units[index]
        if unit.placement.optimizer is Scope.WHOLE and not unit.away:
            unit.gradients.gather().wait()
        unit.values.finish_offers()  # whoever has sent its gradients has had the values
        engine.kept[first : first + len(unit.params)] = bytes(map(max, zip(*rows, strict=True)))
        unit.take_edits()
        if unit.away:
            engine.away.start_inside(index, self._groups())
            if not unit.placement.late:
                self._awaited.append(index)
        else:
            with span("update", "inside", unit.name):
                self._by_unit[index].update(self._groups(), engine.kept, first, 1.0)
            if unit.gathers_updated:
                self._gathers.append(unit.values.gather_updated())
        unit.values.changed()
        unit.know_edits()
        unit.gradients.consume()

    def finish(self) -> None:
        """End the updates that are still on the way, so that all ranks hold the same values."""
        self._engine.schedule.drain()
        for index in self._awaited:
            self._gathers += self._engine.away.finish(index)
        self._awaited.clear()
        while self._gathers:
            self._gathers.pop().wait()

    def end_step(self) -> None:
        engine = self._engine
        engine.tidy_after_error()
        engine.passes.gathers.catch_up()
        engine.bring_what_is_due()
        engine.agree_on_order()
        engine.schedule.drain()
        engine.passes.release_all()
        self.finish()
        for unit in engine.units:
            unit.take_edits()
        engine.used = bytearray(len(engine.params))
        engine.unsettled = False
        engine.after_step()

    def refuse_backward(self) -> NoReturn:
        raise StateError(f"{ASKED} updates in every backward: call optimizer.step() before the next one")

    def refuse_whole(self) -> NoReturn:
        raise StateError(
            f"{ASKED} would update in a backward inside full_parameters, which would keep old values; leave it first"
        )

    def refuse_late(self, name: str) -> NoReturn:
        raise StateError(
            f"a gradient of {name} came after its unit was updated: with {ASKED} every parameter must get its gradient "
            f"once in one backward (no reentrant checkpoints that share blocks, no second backward before step())"
        )

    def refuse_zero_grad(self) -> NoReturn:
        raise StateError(f"{ASKED} has updated parameters in backward: call step() before zero_grad()")

    def refuse_accumulation(self) -> NoReturn:
        raise StateError(f"{ASKED} updates in every backward, so nothing can accumulate; leave it out")

    def refuse_clipping(self) -> NoReturn:
        raise StateError(f"{ASKED} has updated each unit by now, so nothing is left to clip; leave it out")
