"""Bytes of training state on one rank, from sizes and the placement table. The runtime's own reports use this too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.sizes import UnitSize
from onefold.settings.placement import Placement, Scope, Tier

PAGE = 4096  # bytes: files are as many of these
LEAF = 256  # bytes: where tensors start in a file


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


def parameter_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Values this rank keeps on a tier when nothing is gathered: all, or the shard and, on the device, one mark for
    each parameter whose values may be out of sight."""
    if placement.parameters is Scope.REPLICATED and not (unit.trained and placement.late):
        whole = unit.whole if unit.trained else unit.used
        return whole * unit.widths.compute if tier is Tier.DEVICE else 0
    kept = (unit.shard if placement.parameters is Scope.SHARDED else unit.whole) * unit.widths.compute
    marks = unit.params * unit.widths.compute if tier is Tier.DEVICE else 0
    if tier is not placement.parameters_tier:
        return marks
    return marks + (file_bytes(kept) if tier is Tier.DISK else kept)


def gradient_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Where the host updates, my shard waits there and nothing stays on the device."""
    if not unit.trained or tier is not (Tier.HOST if placement.updated_on_host else Tier.DEVICE):
        return 0
    if placement.updated_on_host or placement.gradients is Scope.SHARDED:
        return unit.shard * unit.widths.grad
    loose = unit.shard == unit.whole and unit.widths.narrow and unit.widths.grad == unit.widths.compute
    return (unit.used if loose else unit.whole) * unit.widths.grad  # one rank: as autograd made them, without padding


def updated_numel(unit: UnitSize, placement: Placement) -> int:
    """Elements this rank's optimizer works on."""
    if not unit.trained:
        return 0
    return unit.body if placement.optimizer is Scope.REPLICATED else unit.owned


def optimizer_bytes(unit: UnitSize, placement: Placement, cost: StateCost, tier: Tier = Tier.DEVICE) -> int:
    """Master and state; one vector per unit, as where all parameters are in one param group. What counts steps is too
    small for a file."""
    numel = updated_numel(unit, placement)
    counts = cost.per_tensor if numel else 0
    if placement.optimizer_tier is Tier.DISK:
        in_file = file_bytes(numel * unit.widths.master, numel * cost.per_element)
        return in_file if tier is Tier.DISK else counts if tier is Tier.HOST else 0
    return numel * (unit.widths.master + cost.per_element) + counts if tier is placement.optimizer_tier else 0


def file_bytes(*tensors: int) -> int:
    """Of a file in which tensors of so many bytes rest."""
    return -(-sum(-(-nbytes // LEAF) * LEAF for nbytes in tensors) // PAGE) * PAGE


def state_bytes(
    units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost, tier: Tier = Tier.DEVICE
) -> StateBytes:
    """On one tier; gradients as they are between backward and step."""
    rows = list(zip(units, placements, strict=True))
    return StateBytes(
        sum(parameter_bytes(unit, placement, tier) for unit, placement in rows),
        sum(gradient_bytes(unit, placement, tier) for unit, placement in rows),
        sum(optimizer_bytes(unit, placement, cost, tier) for unit, placement in rows),
    )
