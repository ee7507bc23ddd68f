"""A unit before its buffers exist: which parameters it holds, where each of their states will be, what they compute in.

Planner and runtime read the same specs, so that what is planned is what is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from onefold.cost.layout import UnitLayout
from onefold.cost.sizes import UnitSize, size_of_layout
from onefold.settings.offload import Offload
from onefold.settings.placement import STAGES, Placement, Scope, Tier
from onefold.settings.precision import Precision
from onefold.settings.widths import Widths
from onefold.settings.zero import Zero

AS_SET: Mapping[str, Tier] = MappingProxyType({})  # no unit's tier differs from what the settings say


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """What is known of a unit without a tensor of it."""

    layout: UnitLayout
    placement: Placement
    dtype: torch.dtype  # that its parameters compute in
    trained: bool
    blocks: tuple[str, ...]  # that its parameters belong to, in order; none outside every block

    @property
    def flat(self) -> bool:
        """Its parameters move into a flat buffer. Frozen ones that stay replicated are left in their own tensors."""
        return self.trained or self.placement.parameters is Scope.SHARDED

    def size(self, rank: int, precision: Precision) -> UnitSize:
        """The unit as `rank` holds it, under a precision that is decided."""
        widths = precision.dtypes(self.dtype).widths
        return size_of_layout(self.layout, rank, widths, blocks=self.blocks, trained=self.trained)


def place_all(settings: Zero) -> Placement:
    """The row of the placement table for most units. Ranks compare it before stage="auto" is decided: as stage 3."""
    offload = Offload.of(settings.offload)
    row = STAGES[3 if settings.stage == "auto" else settings.stage].on(offload.optimizer_tier, offload.parameters_tier)
    hidden = row.hidden_between_passes or (settings.overlap_param_gather and row.gathers_updated)
    return row._replace(hidden_between_passes=hidden)


def place(
    layout: UnitLayout, settings: Zero, tiers: Mapping[str, Tier] = AS_SET, parameter_tiers: Mapping[str, Tier] = AS_SET
) -> Placement:
    """The row of the placement table for one unit: small ones may keep their parameters replicated (keep_whole).
    `tiers` has, by the names of units, where Offload(optimizer="auto") put their optimizer state, and
    `parameter_tiers` where it put their parameters."""
    placement = place_all(settings)
    if layout.name in tiers or layout.name in parameter_tiers:
        placement = placement.on(
            tiers.get(layout.name, placement.optimizer_tier),
            parameter_tiers.get(layout.name, placement.parameters_tier),
        )
    placement = placement.over(layout.ranks)
    keep = settings.keep_whole
    small = keep(layout.name, layout.used_numel) if callable(keep) else layout.used_numel <= keep
    return (
        placement._replace(parameters=Scope.REPLICATED, parameters_tier=Tier.DEVICE, hidden_between_passes=False)
        if small
        else placement
    )


def widths_by_kind(units: Iterable[UnitSpec], precision: Precision) -> dict[str, Widths]:
    """Bytes per element of each kind of parameter, trained and frozen, under a precision that is decided."""
    return {unit.layout.kind: precision.dtypes(unit.dtype).widths for unit in units}


def frozen_kinds(units: Iterable[UnitSpec]) -> frozenset[str]:
    return frozenset(unit.layout.kind for unit in units if not unit.trained)
