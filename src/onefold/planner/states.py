"""Bytes of training state on one rank, from sizes and the placement table. The runtime's own reports use this too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.placement import Placement, Scope
from onefold.planner.sizes import UnitSize


class StateCost(NamedTuple):
    """Bytes an optimizer class keeps: per element, and per vector it sees (step counts)."""

    per_element: int
    per_tensor: int = 0
    one_pass: bool = False  # whether our kernels know it, which borrow nothing where 16 bits compute


class StateBytes(NamedTuple):
    """What ZeRO shards, on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def parameter_bytes(unit: UnitSize, placement: Placement) -> int:
    """Values this rank keeps when nothing is gathered: all, or the shard and one mark per parameter."""
    if placement.parameters is Scope.SHARD:
        return (unit.shard + unit.params) * unit.widths.compute
    return (unit.whole if unit.trained else unit.used) * unit.widths.compute


def gradient_bytes(unit: UnitSize, placement: Placement) -> int:
    kept = unit.whole if placement.gradients is Scope.WHOLE else unit.shard
    return kept * unit.widths.grad if unit.trained else 0


def updated_numel(unit: UnitSize, placement: Placement) -> int:
    """Elements this rank's optimizer works on."""
    if not unit.trained:
        return 0
    return unit.body if placement.optimizer is Scope.WHOLE else unit.owned


def optimizer_bytes(unit: UnitSize, placement: Placement, cost: StateCost) -> int:
    """Master and state; one vector per unit, as where all parameters are in one param group."""
    numel = updated_numel(unit, placement)
    return numel * (unit.widths.master + cost.per_element) + (cost.per_tensor if numel else 0)


def state_bytes(units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost) -> StateBytes:
    rows = list(zip(units, placements, strict=True))
    return StateBytes(
        sum(parameter_bytes(unit, placement) for unit, placement in rows),
        sum(gradient_bytes(unit, placement) for unit, placement in rows),
        sum(optimizer_bytes(unit, placement, cost) for unit, placement in rows),
    )
