"""Offload(optimizer="auto"): where masters and gradients wait for the end of the first step, which decides.

Candidates are the units whose optimizer state a formula, which does not know activations, can have on the device. They
have no state before the first step has ended. The state of the others is made where it will most likely stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.automatic import host_need, split_offloaded
from onefold.cost.sizes import UnitSize
from onefold.cost.splits import tiers_of
from onefold.cost.states import StateCost, updated_numel
from onefold.settings.placement import Placement, Tier

NONE = StateCost(0)


class FirstPlacement(NamedTuple):
    tiers: list[Tier]  # of the masters of units, and of the state of those that do not wait
    waiting: frozenset[int]  # units that are updated at the end of the first step, and have no state before


class Units(NamedTuple):
    """The units of a model on one rank. The numbers of units below count trained ones."""

    sizes: Sequence[UnitSize]
    placements: Sequence[Placement]
    cost: StateCost

    @property
    def trained(self) -> list[tuple[UnitSize, Placement]]:
        return [pair for pair in zip(self.sizes, self.placements, strict=True) if pair[0].trained]

    @property
    def numbers(self) -> range:
        return range(len(self.trained))

    def host_bytes(self, on_device: Sequence[int], cost: StateCost = NONE) -> int:
        """Bytes in host memory of masters and gradients of all units but these, and of state if it has a cost."""
        tiers = tiers_of(len(self.numbers), on_device, self.numbers)
        return host_need(self.sizes, self.placements, tiers, cost=cost)

    def disk_bytes(self, numbers: Sequence[int]) -> int:
        """Bytes that files of these units will take: of state, and of masters that are elsewhere now."""
        found = 0
        for size, placement in (self.trained[at] for at in numbers):
            numel = updated_numel(size, placement)
            moves = placement.optimizer_tier is not Tier.DISK
            found += self.cost.vectors(numel) + moves * numel * size.widths.master
        return found


def without_disk(units: Units, candidates: Sequence[int], host_bytes: int) -> FirstPlacement:
    """Where the host could not hold the masters and gradients of all units, those of the first candidates are on the
    device from the start."""
    state = units.host_bytes(candidates, units.cost) - units.host_bytes(candidates)
    counts = range(len(candidates))
    there = next((n for n in counts if units.host_bytes(candidates[:n]) + state <= host_bytes), len(candidates))
    return FirstPlacement(tiers_of(len(units.numbers), candidates[:there], units.numbers), frozenset(candidates))


def with_disk(
    units: Units, candidates: Sequence[int], host_bytes: int, disk_bytes: int, *, in_backward: bool
) -> FirstPlacement:
    """On disk is what the host cannot hold beside masters and gradients of candidates. Once candidates have left for
    the device, the host holds more: where the disk has no room for what it would hold no longer than that, all units
    wait."""
    sizes, placements, cost = units
    left = max(host_bytes - (units.host_bytes([]) - units.host_bytes(candidates)), 0)
    split = split_offloaded(sizes, placements, candidates, left, cost=cost, in_backward=in_backward)
    on_disk = [at for at, tier in enumerate(split) if tier is Tier.DISK]
    if units.disk_bytes(on_disk) <= disk_bytes:
        on_host = [at for at in units.numbers if at not in on_disk]
        return FirstPlacement(tiers_of(len(units.numbers), (), on_host), frozenset(candidates))
    tiers = split_offloaded(sizes, placements, (), host_bytes, cost=NONE)
    return FirstPlacement(tiers, frozenset(units.numbers))
