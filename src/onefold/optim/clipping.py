"""Gradients clipped by their norm over the whole model, for one Optimizer.

1 Each rank combines the norms of its units in a fixed order into one number.  2 The numbers of all ranks are gathered
and combined in rank order: so the norm has the same bits on every rank and at every stage.  3 fp32 gradients are
multiplied at once; 16-bit ones when the update reads them, so that they are rounded once.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.meter import Label
from onefold.errors import ConfigError
from onefold.optim.reduced_gradients import pieces
from onefold.runtime.engine import Engine
from onefold.settings.placement import Scope


class Norms(NamedTuple):
    """Norms of gradients, on the device, in fp64."""

    units: Tensor  # of what this rank holds of each unit
    total: Tensor  # of the whole model: the same on every rank


class Clipping:
    """What clip_grad_norm has found and done since the last step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.norms: Norms | None = None
        self.factor: float | Tensor = 1.0  # of 16-bit gradients, applied when the update reads them

    def forget(self) -> None:
        self.norms, self.factor = None, 1.0

    def clip(self, max_norm: float, norm_type: float, others: Set[str]) -> Tensor:
        """Clips gradients that are complete, without those of parameters with the names `others`; the norm before.
        Collective."""
        engine = self._engine
        self.norms = self._measure(norm_type, others)
        dtype = torch.promote_types(engine.params[0].dtype, torch.float32)
        norm = (self.norms.total / engine.scale.value).to(dtype)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.factor = self.factor * factor
        if norm.is_cuda or factor < 1.0 or not torch.isfinite(norm):
            self._multiply_wide(factor, others)
        return norm

    def _measure(self, norm_type: float, others: Set[str]) -> Norms:
        engine, holders = self._engine, self._engine.comms.holders
        by_unit = torch.zeros(len(engine.units), dtype=torch.float64, device=engine.device)
        by_rank = torch.zeros(holders.size, dtype=torch.float64, device=engine.device)
        for index, unit in enumerate(engine.units):
            if unit.gradients.reduced and engine.tied.counts(index):
                norms = unit.gradients.norms(norm_type, lambda name: engine.counts(name) and name not in others)
                mine = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else 0.0
                by_unit[index] = mine * self.factor if unit.dtypes.narrow else mine  # clipped before, not yet applied
        by_rank[holders.rank] = torch.linalg.vector_norm(by_unit, norm_type)
        holders.all_gather(by_rank, Label("norm", "step")).wait()
        return Norms(by_unit, torch.linalg.vector_norm(by_rank, norm_type))

    def _multiply_wide(self, factor: Tensor, others: Set[str]) -> None:
        """Multiplies gradients that are not in 16 bits."""
        for unit in (unit for unit in self._engine.units if not unit.dtypes.narrow):
            held = unit.layout.body if unit.placement.optimizer is Scope.REPLICATED else unit.mine
            slots = (slot for slot in unit.layout.slots if slot.name not in others)
            for span in [slot.span.clip(held) for slot in slots] if others else [held]:
                unit.gradients.multiply(span, factor)

    def apply(self, others: Set[str]) -> None:
        """Multiplies 16-bit gradients by the factor now, which step() would do when it reads them."""
        factor = self.factor
        self.forget()
        if not isinstance(factor, Tensor):
            return
        narrow = {slot.name for unit in self._engine.units if unit.dtypes.narrow for slot in unit.layout.slots}
        for name, piece in pieces(self._engine, others):
            if name in narrow:
                piece.mul_(factor.to(piece.device))


def check_norm(max_norm: object, norm_type: object) -> None:
    """Raises for settings of clip_grad_norm that are no numbers, or out of range."""
    if not (isinstance(max_norm, int | float) and max_norm >= 0):
        raise ConfigError(f"max_norm={max_norm!r} is not a number of at least 0")
    if not (isinstance(norm_type, int | float) and norm_type > 0):
        raise ConfigError(f"norm_type={norm_type!r} is not a positive number or inf")
