"""Moves the optimizer state of units between device, host memory and disk while a model trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onefold.model.unit_spec import place
from onefold.runtime.engine import Engine
from onefold.settings.placement import Tier


@torch.no_grad()
def move_states(engine: Engine, tiers: Mapping[str, Tier], why: str) -> None:
    """Keeps master and optimizer state of trained units, by their names, on these tiers from now on; `why` is what
    placement() tells. No update and no reduction is in flight."""
    resolved, units = engine.resolved, {unit.name: unit for unit in engine.units}
    specs = {spec.layout.name: spec for spec in resolved.units}
    moved = {
        name: place(specs[name].layout, resolved.settings, {name: tier}, {name: specs[name].placement.parameters_tier})
        for name, tier in tiers.items()
        if tier is not units[name].placement.optimizer_tier
    }
    for name in sorted(moved, key=lambda name: moved[name].optimizer_tier is Tier.DEVICE):  # what leaves goes first
        if moved[name].optimizer_tier is Tier.DEVICE:
            units[name].move_optimizer(moved[name])
        else:
            with _disable_current_modes():  # what counts tensors of the device does not see those of the host
                units[name].move_optimizer(moved[name])
    placed = tuple(
        dataclasses.replace(spec, placement=moved.get(spec.layout.name, spec.placement)) for spec in resolved.units
    )
    engine.see_placements(dataclasses.replace(resolved, units=placed, why=why))
