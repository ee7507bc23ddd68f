"""A step that fails after its first write leaves parameters of two steps: the model is marked, and refuses to be used.

Every update policy runs its updates inside one `StepUnderWay`, and tells it which unit it is about to write. An error
before the first write leaves the model as it was, and step() can be called again. With updates in backward that is
impossible: the failed unit's gradient is gone, and other units would be updated without it, so the model is marked.
"""

from __future__ import annotations

from types import TracebackType

from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Situation
from onefold.state.unit import Unit


class StepUnderWay:
    """Surrounds the updates of a step; in backward, each part of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unit, self._wrote = "", False

    def comes_to(self, unit: Unit) -> None:
        """The update of this unit is next."""
        self._unit = unit.name

    def writes(self, unit: Unit) -> None:
        """The update of this unit may write from here on."""
        self._unit, self._wrote = unit.name, True

    def misses(self, unit: Unit) -> None:
        """This unit will not be updated in this step, in which others are."""
        self._unit, self._wrote = unit.name, True

    def ended(self) -> None:
        """All units have been updated, or a load will replace them."""
        self._wrote = False

    def __enter__(self) -> StepUnderWay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._wrote and self._engine.broken is None:
            self._engine.mark_broken(Situation.UPDATE_FAILED, self._unit)
