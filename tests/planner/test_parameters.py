"""Offload(optimizer="auto"): which units keep their parameters on the device, by formula."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from onefold.comm.strategy import pairwise
from onefold.cost.automatic import ADAM, choose_tiers, host_need
from onefold.cost.hardware import hardware
from onefold.cost.parameters import choose_parameters, parameter_need
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateBytes, StateCost, state_bytes
from onefold.settings.placement import STAGES, Placement, Scope, Tier
from onefold.settings.widths import widths_of


def rows_of(units: Sequence[UnitSize], ranks: int, replicated: Sequence[int]) -> dict[Tier, list[Placement]]:
    """The placements of units with parameters on each tier; a few are always replicated, as keep_whole makes them."""
    whole = STAGES[3].on(Tier.HOST, Tier.DEVICE).over(ranks)._replace(parameters=Scope.REPLICATED)
    rows = {tier: STAGES[3].on(Tier.HOST, tier).over(ranks) for tier in Tier}
    return {tier: [whole if at in replicated else row for at in range(len(units))] for tier, row in rows.items()}


def drawn(draw: random.Random, ranks: int) -> list[UnitSize]:
    sizes = [64 * ranks * draw.choice([1, 4, 4, 4, 9, 30]) for _ in range(draw.randint(1, 14))]
    widths = widths_of(draw.choice(["fp32", "bf16"]), "fp32")
    return [
        UnitSize(f"{at}", n, n, n // ranks, n, n // ranks, 2, widths, (f"block {at // 2}",), largest_numel=n)
        for at, n in enumerate(sizes)
    ]


def on_tier(
    units: Sequence[UnitSize], rows: dict[Tier, list[Placement]], tiers: Sequence[Tier], tier: Tier
) -> StateBytes:
    placements = [rows[one][at] for at, one in enumerate(tiers)]
    return state_bytes(units, placements, StateCost(0), tier)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_larger_budget_never_has_fewer_bytes_on_the_device(ranks: int) -> None:
    for seed in range(20):
        draw = random.Random(1000 * ranks + seed)
        units, strategy = drawn(draw, ranks), pairwise(ranks)
        rows = rows_of(units, ranks, [at for at in range(len(units)) if draw.random() < 0.1])
        need = {
            tier: parameter_need(units, rows[tier], strategy, cuda=False).total for tier in (Tier.DEVICE, Tier.HOST)
        }
        budgets = sorted(draw.randint(need[Tier.HOST], max(need.values()) + 1) for _ in range(12))
        before = -1
        for budget in [*budgets, need[Tier.DEVICE]]:
            tiers = choose_parameters(units, rows, strategy, cuda=False, device_bytes=budget)
            placements = [rows[tier][at] for at, tier in enumerate(tiers)]
            taken = parameter_need(units, placements, strategy, cuda=False)
            assert taken.total <= budget or all(row.parameters_tier is not Tier.DEVICE for row in placements if row)
            there = taken.kept if ranks > 1 else taken.total  # one rank has no copy of what is always there
            assert there >= before, (seed, budget)
            before = there
        assert set(tiers) == {Tier.DEVICE}, "all stay where all fit"


def test_the_first_units_stay_and_the_last_are_on_disk() -> None:
    n, count = 64 << 10, 40  # large beside the page size of files, and more units than are in buffers at once
    widths = widths_of("bf16", "fp32")
    unit = UnitSize("block", n, n, n // 2, n, n // 2, 2, widths, ("block",), largest_numel=n)
    units, strategy = [unit] * count, pairwise(2)
    rows = rows_of(units, 2, [])
    every = parameter_need(units, rows[Tier.DEVICE], strategy, cuda=False).total
    none = parameter_need(units, rows[Tier.HOST], strategy, cuda=False).total
    device = (every + none) // 2
    at_most = {}
    on_disk = [Tier.DISK] * len(units)
    needs = [host_need(units, rows[tier], on_disk, cost=ADAM) for tier in (Tier.DEVICE, Tier.HOST)]
    half = needs[0] + (needs[1] - needs[0]) // 4
    for host in (None, 10**9, half, 1):
        tiers = choose_parameters(units, rows, strategy, cuda=False, device_bytes=device, host_bytes=host)
        assert tiers == sorted(tiers, key=list(Tier).index), "device, then host, then disk"
        at_most[host] = [tiers.count(tier) for tier in Tier]
    assert at_most[None] == at_most[10**9] and at_most[None][2] == 0 and 14 <= at_most[None][0] <= 26
    assert 0 < at_most[half][1] < at_most[None][1] and at_most[half][0] == at_most[None][0]
    assert at_most[1][1] == 0 and at_most[1][2] == count - at_most[1][0], "a host without room has none"


def test_units_whose_parameters_are_elsewhere_have_no_optimizer_state_on_the_device() -> None:
    units, strategy = drawn(random.Random(1), 2), pairwise(2)
    rows = rows_of(units, 2, [])
    mixed = [rows[Tier.HOST if at % 2 else Tier.DEVICE][at] for at in range(len(units))]
    found = choose_tiers(units, mixed, strategy=strategy, machine=hardware("laptop"), device_bytes=1 << 40)
    assert list(found.tiers) == [row.parameters_tier for row in mixed]


@pytest.mark.parametrize("budget", [0, 1, 100])
def test_a_budget_that_nothing_fits_leaves_only_what_is_always_replicated(budget: int) -> None:
    units, strategy = drawn(random.Random(3), 2), pairwise(2)
    rows = rows_of(units, 2, [0])
    tiers = choose_parameters(units, rows, strategy, cuda=False, device_bytes=budget)
    assert tiers[0] is Tier.DEVICE and set(tiers[1:]) <= {Tier.HOST}
