"""Checks that updates are not lost in rounding: compares a few master parameters before and after a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.runtime.engine import Engine
from onefold.state.unit import Unit

UNITS, ELEMENTS = 8, 512


class Sample(NamedTuple):
    """Elements of one unit's master parameters before a step."""

    unit: Unit
    span: Span
    before: Tensor
    has_gradient: Tensor


class UpdateProbe:
    """Samples some elements of some units, spread over the model."""

    def __init__(self, engine: Engine) -> None:
        owners = [unit for unit in engine.units if unit.master.owned.numel]
        self._units = owners[:: max(1, len(owners) // UNITS)]
        self._samples: list[Sample] = []

    def before(self) -> None:
        """Takes the samples; called between clipping and the step."""
        self._samples = []
        for unit in self._units:
            start = unit.master.owned.start
            span = Span(start, min(unit.master.owned.stop, start + ELEMENTS))
            if unit.gradients.reduced:
                has_gradient = unit.gradients.part(span) != 0
                self._samples.append(Sample(unit, span, self._master(unit, span), has_gradient))

    def after(self) -> tuple[int, int]:
        """How many sampled elements changed, and how many had a gradient."""
        changed = expected = 0
        for unit, span, before, has_gradient in self._samples:
            changed += int(((self._master(unit, span) != before) & has_gradient).sum())
            expected += int(has_gradient.sum())
        self._samples = []
        return changed, expected

    def _master(self, unit: Unit, span: Span) -> Tensor:
        out = torch.empty(span.numel, dtype=unit.master.dtype, device=unit.pool.device)
        with unit.state_in_memory():
            unit.master.read(span, out)
        return out
