"""Bytes of training state on one rank, from sizes and the placement table. The runtime's own reports use this too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.sizes import UnitSize
from onefold.settings.placement import Placement, Scope, Tier

PAGE = 4096  # bytes: the length of a file is a multiple
LEAF = 256  # bytes: the offset of a tensor in a file is a multiple


class StateCost(NamedTuple):
    """Bytes of state that an optimizer class keeps: per element, and per parameter it sees (step counts)."""

    per_element: int
    per_tensor: int = 0
    one_pass: bool = False  # whether Onefold's kernels support it, which need no scratch where 16 bits compute


class StateBytes(NamedTuple):
    """Bytes of the states that ZeRO shards, on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def parameter_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of parameters that this rank keeps on a tier while nothing is unsharded: all, or its shard; and on the
    device one placeholder element for each parameter that may be hidden."""
    if placement.parameters is Scope.REPLICATED and not (unit.trained and placement.hidden_between_passes):
        numel = unit.numel if unit.trained else unit.used_numel
        return numel * unit.widths.compute if tier is Tier.DEVICE else 0
    kept = (unit.shard if placement.parameters is Scope.SHARDED else unit.numel) * unit.widths.compute
    placeholders = unit.param_count * unit.widths.compute if tier is Tier.DEVICE else 0
    if tier is not placement.parameters_tier:
        return placeholders
    return placeholders + (file_bytes(kept) if tier is Tier.DISK else kept)


def gradient_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of gradients that this rank keeps on a tier between backward and step; of units that the host updates, its
    shard on the host and nothing on the device."""
    if not unit.trained or tier is not (Tier.HOST if placement.updated_on_host else Tier.DEVICE):
        return 0
    if placement.updated_on_host or placement.gradients is Scope.SHARDED:
        return unit.shard * unit.widths.grad
    unflattened = unit.shard == unit.numel and unit.widths.narrow and unit.widths.grad == unit.widths.compute
    # One rank: in autograd's own tensors, without padding.
    return (unit.used_numel if unflattened else unit.numel) * unit.widths.grad


def updated_numel(unit: UnitSize, placement: Placement) -> int:
    """Elements of a unit that this rank updates."""
    if not unit.trained:
        return 0
    return unit.body_numel if placement.optimizer is Scope.REPLICATED else unit.owned_numel


def optimizer_bytes(unit: UnitSize, placement: Placement, cost: StateCost, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of master and optimizer state on a tier; one vector per unit, as if all parameters were in one param group.
    Step counts are not kept in files but in host memory."""
    numel = updated_numel(unit, placement)
    counts = cost.per_tensor if numel else 0
    if placement.optimizer_tier is Tier.DISK:
        in_file = file_bytes(numel * unit.widths.master, numel * cost.per_element)
        return in_file if tier is Tier.DISK else counts if tier is Tier.HOST else 0
    return numel * (unit.widths.master + cost.per_element) + counts if tier is placement.optimizer_tier else 0


def file_bytes(*tensors: int) -> int:
    """Bytes of a file that keeps tensors of these sizes."""
    return -(-sum(-(-nbytes // LEAF) * LEAF for nbytes in tensors) // PAGE) * PAGE


def state_bytes(
    units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost, tier: Tier = Tier.DEVICE
) -> StateBytes:
    """Bytes of all states on one tier; of gradients, those between backward and step."""
    rows = list(zip(units, placements, strict=True))
    return StateBytes(
        sum(parameter_bytes(unit, placement, tier) for unit, placement in rows),
        sum(gradient_bytes(unit, placement, tier) for unit, placement in rows),
        sum(optimizer_bytes(unit, placement, cost, tier) for unit, placement in rows),
    )
