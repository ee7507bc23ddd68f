"""Offload(optimizer="auto"): of all splits of units over device, host and disk, the one with the least planned time."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import NamedTuple

import pytest

from onefold.cost import splits
from onefold.cost.hardware import hardware
from onefold.cost.sizes import UnitSize
from onefold.cost.splits import Overlap, UnitSeconds, fastest, seconds_of, split_s
from onefold.cost.states import StateCost
from onefold.settings.placement import STAGES, Placement, Tier
from onefold.settings.widths import Widths

FASTER = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}


class Case(NamedTuple):
    """Units of some sizes, how many bytes of state the device and the host hold, and what overlaps."""

    sizes: list[int]
    device: int
    host: int
    overlap: Overlap
    units: list[UnitSeconds]

    def bytes_on(self, tiers: tuple[Tier, ...] | list[Tier], tier: Tier) -> int:
        return sum(size for size, one in zip(self.sizes, tiers, strict=True) if one is tier)

    def fits(self, tiers: tuple[Tier, ...]) -> bool:
        return self.bytes_on(tiers, Tier.DEVICE) <= self.device and self.bytes_on(tiers, Tier.HOST) <= self.host

    def fills(self, tiers: tuple[Tier, ...]) -> bool:
        """Whether no unit could be moved to the device, nor from the disk to the host."""
        ups = [
            (*tiers[:at], tier, *tiers[at + 1 :])
            for at, old in enumerate(tiers)
            for tier in (Tier.DEVICE, Tier.HOST)
            if FASTER[tier] < FASTER[old]
        ]
        return self.fits(tiers) and not any(self.fits(other) for other in ups)

    def best_s(self) -> float:
        """The least seconds of all splits that fit and fill."""
        every = product(Tier, repeat=len(self.sizes))
        return min(split_s(self.units, tiers, self.overlap) for tiers in every if self.fills(tiers))

    def lacking(self, tiers: tuple[Tier, ...] | list[Tier], disk: float) -> int:
        """Bytes that a disk of this size lacks for what is on it."""
        return int(max(self.bytes_on(tiers, Tier.DISK) - disk, 0))

    def best_beside(self, disk: int) -> tuple[int, float]:
        """The least bytes that this disk lacks in any split that fits and fills, and the least seconds of those."""
        every = [tiers for tiers in product(Tier, repeat=len(self.sizes)) if self.fills(tiers)]
        return min((self.lacking(tiers, disk), split_s(self.units, tiers, self.overlap)) for tiers in every)

    def chosen(self, disk: float = math.inf) -> list[Tier]:
        return fastest(
            self.units,
            self.overlap,
            candidates=range(len(self.sizes)),
            fits_device=lambda chosen: sum(self.sizes[at] for at in chosen) <= self.device,
            fits_host=lambda _, chosen: sum(self.sizes[at] for at in chosen) <= self.host,
            lacking=lambda tiers: self.lacking(tiers, disk),
        )


def drawn(seed: int, units: int, *, alike: bool) -> Case:
    draw = random.Random(seed)
    sizes = [2] * units if alike else [draw.choice([1, 2, 2, 2, 5, 9]) for _ in range(units)]
    device = draw.randint(0, sum(sizes))
    host = draw.choice([draw.randint(0, sum(sizes)), sum(sizes)])
    passes, on_host, disk = draw.choice([0.0, 1.0, 4.0]), draw.choice([0.5, 2.0, 8.0]), draw.choice([1, 3])
    seconds = [UnitSeconds(s * passes, 2 * s * passes, s / 10, s * on_host, s * on_host * disk) for s in sizes]
    return Case(sizes, device, host, Overlap(draw.random() < 0.6, draw.random() < 0.8), seconds)


@pytest.mark.parametrize("alike", [True, False])
def test_of_all_splits_of_six_units_the_chosen_one_takes_the_least_planned_seconds(alike: bool) -> None:
    for seed in range(40):
        case = drawn(seed, 6, alike=alike)
        tiers = case.chosen()
        assert case.fills(tuple(tiers)), (seed, tiers)
        assert split_s(case.units, tiers, case.overlap) == pytest.approx(case.best_s()), (seed, tiers)


def test_beside_a_small_disk_a_slower_split_that_fits_it_is_chosen() -> None:
    """Of all splits of six units that fit, or lack the fewest bytes, the one with the least seconds."""
    slower = lacks = 0
    for seed in range(200):
        case = drawn(seed, 6, alike=False)
        on_disk = case.bytes_on(case.chosen(), Tier.DISK)
        for disk in range(max(on_disk - 3, 0), on_disk):
            tiers = case.chosen(disk)
            lacking, seconds = case.lacking(tiers, disk), split_s(case.units, tiers, case.overlap)
            assert (lacking, seconds) == pytest.approx(case.best_beside(disk)), (seed, disk, tiers)
            slower, lacks = slower + (lacking == 0), lacks + (lacking > 0)
    assert slower > 10 and lacks > 10, "disks were to be both large enough for a slower split and too small for any"


class Host(NamedTuple):
    """A host whose buffers are three times as large as its largest unit, and a device of some size."""

    sizes: list[int]
    device: int

    def bytes_on(self, tiers: list[Tier]) -> int:
        rest = [size for size, tier in zip(self.sizes, tiers, strict=True) if tier is not Tier.DEVICE]
        return sum(rest) + 3 * max(rest, default=0)

    def chosen(self, host: float, asked: list[int] | None = None) -> list[Tier]:
        def fits_device(chosen: frozenset[int]) -> bool:
            if asked is not None:
                asked.append(len(chosen))
            return sum(self.sizes[at] for at in chosen) <= self.device

        return fastest(
            [UnitSeconds(s, 2 * s, s / 10, s, s) for s in self.sizes], Overlap(True, True),
            candidates=range(len(self.sizes)), fits_device=fits_device,
            lacking=lambda tiers: int(max(self.bytes_on(tiers) - host, 0)),
        )  # fmt: skip


@pytest.mark.parametrize("last", [[60], [40, 40], [40, 3, 40, 3]])
@pytest.mark.parametrize("alike", [True, False])
def test_the_host_gets_what_it_can_hold(last: list[int], alike: bool) -> None:
    """The units that fill the device from the front leave it too large ones, of which several may be alike."""
    host = Host([*([15] * 10 if alike else range(20, 10, -1)), *last], device=90)
    assert host.bytes_on(host.chosen(math.inf)) > 250 >= host.bytes_on(host.chosen(250))
    assert max(last) not in [size for size, tier in zip(host.sizes, host.chosen(0)) if tier is not Tier.DEVICE]


@pytest.mark.parametrize("units", [12, 60, 240])
def test_a_host_that_can_hold_nothing_is_known_soon(units: int) -> None:
    """Of units of as many sizes few splits are looked at."""
    asked: list[int] = []
    Host(list(range(1, units + 1)), device=units * units // 8).chosen(0, asked)
    assert len(asked) < 20 * units, len(asked)


def test_units_that_are_alike_stay_from_the_front_and_the_last_are_on_disk() -> None:
    for seed in range(20):
        for units in (6, 40):  # of 40 units not every split is compared
            tiers = drawn(seed, units, alike=True).chosen()
            assert tiers == sorted(tiers, key=FASTER.__getitem__), (seed, tiers)


def test_many_units_are_split_as_few_ones_are(monkeypatch) -> None:
    """The search that compares few splits finds the least seconds of six units of one size, and a split near it where
    sizes differ."""
    monkeypatch.setattr(splits, "EXACT_UNITS", 0)
    longer = []
    for seed in range(40):
        alike = drawn(seed, 6, alike=True)
        assert split_s(alike.units, alike.chosen(), alike.overlap) == pytest.approx(alike.best_s()), seed
        case = drawn(seed, 6, alike=False)
        assert case.fills(tuple(case.chosen())), seed
        longer.append(split_s(case.units, case.chosen(), case.overlap) / max(case.best_s(), 1e-9))
    assert max(longer) <= 4 / 3 and sum(one <= 1 + 1e-9 for one in longer) >= 0.9 * len(longer)


def test_a_first_unit_that_is_too_large_leaves_the_device_to_the_others() -> None:
    """An embedding that does not fit does not keep blocks off the device."""
    units = [UnitSeconds(s, 2 * s, s / 10, s, s) for s in (9, 2, 2, 2, 2, 2, 2, 2, 9)]
    tiers = fastest(
        units, Overlap(True, True), candidates=range(9), fits_device=lambda on: sum(units[at].host for at in on) <= 8
    )
    assert [at for at, tier in enumerate(tiers) if tier is Tier.DEVICE] == [1, 2, 3, 4]


def sized(name: str, numel: int) -> UnitSize:
    return UnitSize(name, numel, numel, numel, numel, numel, 1, Widths(2, 2, 2, 2), trained=True)


def test_seconds_of_units_are_the_planners() -> None:
    """One H200: an update takes longer on the host than on the device, and not less on disk; halves take half."""
    row: Placement = STAGES[3].on(Tier.HOST, Tier.DEVICE)
    large, small = seconds_of(
        [sized("a", 1 << 28), sized("b", 1 << 27)], [row, row], StateCost(8), hardware("h200"),
        ranks=1, forward_s=1.0, backward_s=2.0,
    )  # fmt: skip
    assert large.device < large.host <= large.disk
    assert large.forward + small.forward == pytest.approx(1.0) and large.backward == pytest.approx(2 * small.backward)
    assert large.host == pytest.approx(2 * small.host)


def test_units_of_many_sizes_are_split_without_looking_at_each_exchange() -> None:
    """As of a U-Net: each question plans the host's memory, and ranks wait for the answer in their first step."""
    sizes = [10 + at for at in range(60)]
    units = [UnitSeconds(size, 2 * size, size / 10, 2.0 * size, 5.0 * size) for size in sizes]
    asked = []

    def fits_host(on_device: frozenset[int], on_host: frozenset[int]) -> bool:
        asked.append(1)
        return sum(sizes[at] for at in on_host) <= 500

    tiers = fastest(
        units, Overlap(True, True), candidates=range(60),
        fits_device=lambda chosen: sum(sizes[at] for at in chosen) <= 500, fits_host=fits_host,
    )  # fmt: skip
    assert {Tier.DEVICE, Tier.HOST, Tier.DISK} == set(tiers) and len(asked) < 500
