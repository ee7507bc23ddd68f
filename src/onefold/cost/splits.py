"""Which units have their optimizer state on the device, in host memory and on disk, so that a step takes least time.

Why the first units of forward stay on the device, where units are alike: backward comes to them last and the next
forward needs them first, so a host update of them has the least time before it is waited for. An exchange of a unit on
the device for one behind it never shortens a step: the host update of the one behind begins earlier and is needed
later. Likewise, of units that are not on the device the last ones are on disk. Where sizes differ (an embedding, a
head), the first unit may not fit while others do, so splits are compared by their seconds.

A fast tier is always filled: a split that leaves a unit out which would fit is not looked at. By arithmetic alone a
host update that compute hides would cost nothing, but it takes memory bandwidth and launches from the device: with
2.78B parameters on one H200, whose cores update them in 0.66 s, a step took 0.61 s with all state on the device and
0.69 to 0.71 s with all of it on the host, in backward. That is `SLOWED`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from onefold.cost.hardware import Hardware
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost
from onefold.cost.transfers import host_update_s, transfers_of, update_rate
from onefold.settings.placement import Placement, Tier

SLOWED = 0.12  # seconds of the device for each second in which the host updates beside it
KINDS = 6  # sizes of units, up to which splits near the one filled from the front are compared: more have too many
EXACT_UNITS = 6  # up to so many units all splits are compared; beyond, those near the one filled from the front


class UnitSeconds(NamedTuple):
    """Seconds of one unit in a step: of its forward and backward, and of its update with its state on each tier."""

    forward: float
    backward: float
    device: float
    host: float
    disk: float

    def update(self, tier: Tier) -> float:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]


class Overlap(NamedTuple):
    """What host updates overlap with."""

    backward: bool  # they begin as gradients arrive, else when all are complete
    forward: bool  # a forward waits for each unit where it needs it, else step() waits for all


def split_s(units: Sequence[UnitSeconds], tiers: Sequence[Tier], overlap: Overlap) -> float:
    """Seconds of a step, from the beginning of backward to the end of the next forward; `units` are in forward order.
    Host updates run one after the other: of the units whose gradients have arrived, the first of forward comes first.

    >>> units = [UnitSeconds(forward=1, backward=2, device=0, host=4, disk=9)] * 3
    >>> first, last = [Tier.DEVICE, Tier.HOST, Tier.HOST], [Tier.HOST, Tier.HOST, Tier.DEVICE]
    >>> split_s(units, first, Overlap(True, True)), split_s(units, last, Overlap(True, True))
    (12.96, 15.96)
    """
    now, jobs = 0.0, list[tuple[float, int]]()
    for index in range(len(units) - 1, -1, -1):
        now += units[index].backward
        if tiers[index] is not Tier.DEVICE:
            jobs.append((now, index))
        elif overlap.backward:
            now += units[index].device
    if not overlap.backward:
        now += sum(unit.device for unit, tier in zip(units, tiers, strict=True) if tier is Tier.DEVICE)
        jobs = [(now, index) for _, index in jobs]
    ended = _served(jobs, [unit.update(tier) for unit, tier in zip(units, tiers, strict=True)])
    if not overlap.forward:
        now = max([now, *ended.values()])
    for index, unit in enumerate(units):
        now = max(now, ended.get(index, 0.0)) + unit.forward
    on_host = sum(unit.update(tier) for unit, tier in zip(units, tiers, strict=True) if tier is not Tier.DEVICE)
    return now + SLOWED * on_host


def _served(jobs: Iterable[tuple[float, int]], seconds: Sequence[float]) -> dict[int, float]:
    """The time at which each unit's update ends. `jobs` are the earliest start of each and its unit, by that start."""
    ended: dict[int, float] = {}
    coming, there, now = list(jobs)[::-1], list[int](), 0.0
    while coming or there:
        now = now if there else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            heapq.heappush(there, coming.pop()[1])
        index = heapq.heappop(there)
        now = ended[index] = now + seconds[index]
    return ended


def tiers_of(units: int, on_device: Collection[int], on_host: Collection[int]) -> list[Tier]:
    """The tiers of so many units: those numbered in `on_device`, those in `on_host`, and the others on disk."""
    return [Tier.DEVICE if at in on_device else Tier.HOST if at in on_host else Tier.DISK for at in range(units)]


def seconds_of(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    cost: StateCost,
    machine: Hardware,
    *,
    ranks: int,
    forward_s: float,
    backward_s: float,
) -> list[UnitSeconds]:
    """Seconds of each trained unit, where `ranks` share the host; forward and backward are divided by elements."""
    every = sum(unit.numel for unit in units) or 1
    found = []
    for unit, placement in zip(units, placements, strict=True):
        if not unit.trained:
            continue
        device_rate, host_rate = (update_rate(machine, tier, unit.widths, cost) for tier in (Tier.DEVICE, Tier.HOST))
        by_tier = [
            transfers_of([unit], [placement.on(tier, placement.parameters_tier)], cost)
            for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
        ]
        share = unit.numel / every
        found.append(
            UnitSeconds(
                share * forward_s,
                share * backward_s,
                by_tier[0].device / device_rate,
                *(host_update_s(moved, machine, host_rate, ranks) for moved in by_tier[1:]),
            )
        )
    return found


Units = frozenset[int]


class SplitCost(NamedTuple):
    """By which splits are compared; the least is the best."""

    lacking_bytes: int  # of the disk, or without one of host memory
    seconds: float


def fastest(
    units: Sequence[UnitSeconds],
    overlap: Overlap,
    *,
    candidates: Collection[int],
    fits_device: Callable[[Units], bool],
    fits_host: Callable[[Units, Units], bool] = lambda on_device, on_host: True,
    lacking: Callable[[list[Tier]], int] = lambda tiers: 0,
) -> list[Tier]:
    """The tier of each unit's state: of the splits that fill the device with `candidates` and then the host, those for
    which the fewest bytes are `lacking` elsewhere, and of these the one with the fewest seconds. `fits_device` says
    whether units fit on the device, `fits_host` whether units fit in host memory beside those on the device. If a set
    fits, every part of it must fit too."""
    found: dict[Units, tuple[SplitCost, list[Tier]]] = {}

    def cost(on_device: Units, on_host: Units) -> tuple[SplitCost, list[Tier]]:
        tiers = tiers_of(len(units), on_device, on_host)
        return SplitCost(lacking(tiers), round(split_s(units, tiers, overlap), 9)), tiers

    def best_with(on_device: Units) -> tuple[SplitCost, list[Tier]]:
        if on_device not in found:
            rest = [index for index in range(len(units)) if index not in on_device]
            on_host = _best(
                rest,
                lambda chosen: fits_host(on_device, chosen),
                lambda chosen: cost(on_device, chosen)[0],
                lambda index: units[index][2:],
                starts=1,
            )
            found[on_device] = cost(on_device, on_host)
        return found[on_device]

    return best_with(
        _best(sorted(candidates), fits_device, lambda chosen: best_with(chosen)[0], lambda index: units[index][2:])
    )[1]


def _best(
    order: Sequence[int],
    fits: Callable[[Units], bool],
    cost: Callable[[Units], SplitCost],
    kind: Callable[[int], tuple[float, ...]],
    *,
    starts: int = 1 + KINDS,
) -> Units:
    """Of the sets of these units that fit and to which no unit can be added, the one with the least cost; of sets with
    equal costs, the one with the first units. Units of one `kind` are equally large, those of a greater one larger.
    Of many units not all sets are looked at: where the one that is filled from the front lacks bytes elsewhere, the
    search begins with the best of so many `starts`, which take the largest units first."""
    if fits(frozenset(order)):
        return frozenset(order)
    if len(order) <= EXACT_UNITS:
        sets = (frozenset(one) for count in range(len(order) + 1) for one in combinations(order, count))
        fitting = [chosen for chosen in sets if fits(chosen)]
        full = [one for one in fitting if not any(one < other for other in fitting)]
        return min(full, key=lambda chosen: _key(chosen, cost), default=frozenset())
    best, kinds = filled(order, fits, kind), sorted({kind(one) for one in order}, reverse=True)
    if starts > 1 and cost(best).lacking_bytes:
        large = [sorted(order, key=lambda one: kind(one) < least) for least in kinds[: starts - 2]]  # and then the rest
        large.append(sorted(order, key=kind, reverse=True))
        by_start: dict[Units, Sequence[int]] = {filled(one, fits, kind): one for one in large}
        by_start[best] = order
        best = min(by_start, key=lambda chosen: _key(chosen, cost))
        order = by_start[best]
    better = len(kinds) <= KINDS
    while better:
        orders = []
        for index in {kind(one): one for one in reversed(order) if one not in best}.values():  # the first of each kind
            orders.append([index, *(one for one in order if one != index)])
        for index in {kind(one): one for one in order if one in best}.values():  # the last of each kind
            orders.append([*(one for one in order if one != index), index])
        found = [filled(one, fits, kind) for one in orders]
        nearest = min([best, *found], key=lambda chosen: _key(chosen, cost))
        better = nearest != best
        if better:
            best, order = nearest, orders[found.index(nearest)]
    return best


def _key(chosen: Units, cost: Callable[[Units], SplitCost]) -> tuple[SplitCost, list[int]]:
    return cost(chosen), sorted(chosen)


def filled(order: Sequence[int], fits: Callable[[Units], bool], kind: Callable[[int], object]) -> Units:
    """Fills in this order: takes each unit that fits beside those taken before it.

    >>> sizes = [9, 2, 2, 5, 1]
    >>> sorted(filled(range(5), lambda chosen: sum(sizes[one] for one in chosen) <= 6, sizes.__getitem__))
    [1, 2, 4]
    """
    # Most units are alike, so the search doubles its stride while units fit, and halves it where they do not.
    chosen, at, stride, too_large = frozenset[int](), 0, 1, set[object]()
    while at < len(order):
        more = chosen.union(order[at : at + stride])
        if kind(order[at]) in too_large:
            at, stride = at + 1, 1
        elif fits(more):
            chosen, at, stride = more, at + stride, 2 * stride
        elif stride > 1:
            stride //= 2
        else:
            too_large.add(kind(order[at]))
    return chosen
