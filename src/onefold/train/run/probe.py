"""Do updates arrive? Looks at a few of this rank's master values before and after a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.runtime.engine import Engine
from onefold.state.unit import Unit

UNITS, ELEMENTS = 8, 512


class Seen(NamedTuple):
    unit: Unit
    span: Span
    values: Tensor
    pulled: Tensor  # which of them have a gradient


class UpdateProbe:
    """Of some units spread over the model, some elements each."""

    def __init__(self, engine: Engine) -> None:
        owners = [unit for unit in engine.units if unit.master.owned.numel]
        self._units = owners[:: max(1, len(owners) // UNITS)]
        self._seen: list[Seen] = []

    def before(self) -> None:
        """Between clipping and the step."""
        self._seen = []
        for unit in self._units:
            start = unit.master.owned.start
            span = Span(start, min(unit.master.owned.stop, start + ELEMENTS))
            if unit.gradients.reduced:
                pulled = unit.gradients.part(span) != 0
                self._seen.append(Seen(unit, span, self._values(unit, span), pulled))

    def after(self) -> tuple[int, int]:
        """How many moved, of how many that had a gradient."""
        moved = wanted = 0
        for unit, span, values, pulled in self._seen:
            moved += int(((self._values(unit, span) != values) & pulled).sum())
            wanted += int(pulled.sum())
        self._seen = []
        return moved, wanted

    def _values(self, unit: Unit, span: Span) -> Tensor:
        out = torch.empty(span.numel, dtype=unit.master.dtype, device=unit.pool.device)
        with unit.state_in_memory():
            unit.master.read(span, out)
        return out
