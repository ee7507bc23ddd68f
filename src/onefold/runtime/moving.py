"""Moves optimizer state of units between device, host memory and disk, and parameters between device and host memory,
while a model trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onefold.model.resolved import Resolved
from onefold.model.unit_spec import UnitSpec, place
from onefold.runtime.engine import Engine
from onefold.settings.placement import Placement, Tier
from onefold.settings.zero import Zero


@torch.no_grad()
def move_states(engine: Engine, tiers: Mapping[str, Tier], why: str) -> None:
    """Keeps master and optimizer state of trained units, by their names, on these tiers from now on; `why` is what
    placement() tells. No update and no reduction is in flight."""
    resolved, units = engine.resolved, {unit.name: unit for unit in engine.units}
    specs = {spec.layout.name: spec for spec in resolved.units}
    moved = {
        name: _placed(specs[name], resolved.settings, tier, specs[name].placement.parameters_tier)
        for name, tier in tiers.items()
        if tier is not units[name].placement.optimizer_tier
    }
    for name in sorted(moved, key=lambda name: _turn(units[name].placement.optimizer_tier, moved[name].optimizer_tier)):
        if moved[name].optimizer_tier is Tier.DEVICE:
            units[name].move_optimizer(moved[name])
        else:
            with _disable_current_modes():  # what counts tensors of the device does not see those of the host
                units[name].move_optimizer(moved[name])
    _see(engine, dataclasses.replace(resolved, why=why), moved)


def _turn(before: Tier, after: Tier) -> int:
    """First go units whose state leaves the device, then those that come to it, then those that go to disk, then
    those that come from there: each leaves room to those behind it."""
    if before is Tier.DEVICE:
        return 0
    return 1 if after is Tier.DEVICE else 2 if after is Tier.DISK else 3


@torch.no_grad()
def move_parameters(engine: Engine, names: Collection[str], tier: Tier, why: str) -> None:
    """Keeps the parameter shards of these sharded units on this tier from now on, the device or host memory; `why` is
    what placement() tells of parameters. No update, all-gather or reduction is in flight."""
    resolved, units = engine.resolved, {unit.name: unit for unit in engine.all_units}
    moved = {
        spec.layout.name: _placed(spec, resolved.settings, spec.placement.optimizer_tier, tier)
        for spec in resolved.units
        if spec.layout.name in names and spec.placement.parameters_tier is not tier
    }
    for name, placement in moved.items():
        if tier is Tier.DEVICE:
            units[name].move_parameters(placement)
        else:
            with _disable_current_modes():
                units[name].move_parameters(placement)
    _see(engine, dataclasses.replace(resolved, why_parameters=why), moved)


def _placed(spec: UnitSpec, settings: Zero, optimizer: Tier, parameters: Tier) -> Placement:
    """The placement of a unit with its states on these tiers. Parameters that are sharded stay so: one rank, too, keeps
    its shard beside the flat buffer where parameters were off the device once."""
    name = spec.layout.name
    return place(spec.layout, settings, {name: optimizer}, {name: parameters})._replace(
        parameters=spec.placement.parameters
    )


def _see(engine: Engine, resolved: Resolved, moved: Mapping[str, Placement]) -> None:
    placed = tuple(
        dataclasses.replace(spec, placement=moved.get(spec.layout.name, spec.placement)) for spec in resolved.units
    )
    engine.see_placements(dataclasses.replace(resolved, units=placed))
