"""Offload(optimizer="auto"): where masters and gradients wait for the end of the first step, which decides.

Candidates are the units whose optimizer state would fit on the device if activations took nothing. They get no state
before the first step has ended. Other units get theirs at once, on the tier where it will most likely stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.automatic import host_need, split_offloaded
from onefold.cost.sizes import UnitSize
from onefold.cost.splits import tiers_of
from onefold.cost.states import StateCost
from onefold.optim.disk_room import DiskRoom
from onefold.settings.placement import Placement, Tier

NONE = StateCost(0)


class FirstPlacement(NamedTuple):
    tiers: list[Tier]  # of the masters of units, and of the state of those that do not wait
    waiting: frozenset[int]  # units that are updated at the end of the first step, and have no state before


class UnitTable(NamedTuple):
    """The units of a model on one rank. Below, the numbers of units count trained ones."""

    sizes: Sequence[UnitSize]
    placements: Sequence[Placement]
    cost: StateCost

    @property
    def numbers(self) -> range:
        return range(sum(size.trained for size in self.sizes))

    def host_bytes(self, on_device: Sequence[int], cost: StateCost = NONE) -> int:
        """Bytes in host memory of masters and gradients of all units but these, and of state if it has a cost."""
        tiers = tiers_of(len(self.numbers), on_device, self.numbers)
        return host_need(self.sizes, self.placements, tiers, cost=cost)


def without_disk(units: UnitTable, candidates: Sequence[int], host_bytes: int) -> FirstPlacement:
    """Where the host could not hold the masters and gradients of all units, those of the first candidates are on the
    device from the start."""
    state = units.host_bytes(candidates, units.cost) - units.host_bytes(candidates)
    counts = range(len(candidates))
    there = next((n for n in counts if units.host_bytes(candidates[:n]) + state <= host_bytes), len(candidates))
    return FirstPlacement(tiers_of(len(units.numbers), candidates[:there], units.numbers), frozenset(candidates))


def with_disk(
    units: UnitTable,
    candidates: Sequence[int],
    host_bytes: int,
    disk: DiskRoom,
    *,
    in_backward: bool,
) -> FirstPlacement:
    """Of units that are not candidates, the disk has what the host cannot hold beside the masters and gradients of
    candidates. Later it has less, since candidates leave the host for the device. If the disk has no room for it, all
    units wait, so that no state is made before. If not even all memories together have room, it is the first placement
    all the same, which the caller's check refuses. Collective."""
    sizes, placements, cost = units
    left = max(host_bytes - (units.host_bytes([]) - units.host_bytes(candidates)), 0)
    split = split_offloaded(sizes, placements, candidates, left, cost=cost, in_backward=in_backward)
    tiers: list[Tier] = [Tier.HOST if tier is Tier.DEVICE else tier for tier in split]
    if disk.fits(tiers, candidates) or not disk.may_fit(host_bytes):
        return FirstPlacement(tiers, frozenset(candidates))
    return FirstPlacement(split_offloaded(sizes, placements, (), host_bytes, cost=NONE), frozenset(units.numbers))
