"""activations="auto" beside Offload(optimizer="auto"): the first step computes all blocks again, and later steps keep
what fits beside the optimizer state that host memory cannot hold."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

import onefold
from onefold.cost.automatic import host_need
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.offload.test_auto import Outcome, Work, build, differing, step, train

WORK = Work(depth=10, rows=64, state="bf16")  # state in a small form is not kept on disk


class Decided(NamedTuple):
    auto: Outcome
    differs: list[str]
    recomputed: int  # blocks


@lru_cache(maxsize=1)
def known(work: Work) -> tuple[Outcome, int]:
    """The run without offload, and the bytes that all state needs on the host."""
    model, adam = build(work, onefold.Offload(optimizer="host"))
    engine = engine_of(model)
    sizes = [unit.size(0, engine.resolved.precision) for unit in engine.resolved.units]
    rows, cost = [unit.placement for unit in engine.resolved.units], adam.state_cost
    assert cost is not None
    every = host_need(sizes, rows, [Tier.HOST] * len(sizes), cost=cost)
    return train(work._replace(activations="keep"), None), every


def decided(work: Work, budget: int, host_share: float, folder: str) -> Decided:
    """A run whose device may take `budget` bytes, and whose host this share of what all its state would need there."""
    plain, every = known(work)
    host_bytes = int(host_share * every)
    offload = onefold.Offload(optimizer="auto", device_bytes=budget, host_bytes=host_bytes, path=folder)
    auto = train(work._replace(activations="auto"), offload)
    return Decided(auto, differing(plain, auto), recomputed_in(auto.why, work.depth))


def recomputed_in(why: str, blocks: int) -> int:
    """The number of blocks that are computed again, as placement() tells it."""
    return 0 if "activations='keep'" in why else int(re.search(rf"(\d+) of {blocks} blocks are computed", why)[1])  # type: ignore[index]


def kept_inputs(work: Work, budget: int) -> tuple[int, int, int]:
    """Bytes of the buffer for inputs of blocks after steps, measured and planned, and the blocks computed again."""
    offload = onefold.Offload(optimizer="auto", device_bytes=budget)
    model, adam = build(work._replace(activations="auto"), offload)
    for number in range(3):
        step(model, adam, work, number)
    held = onefold.memory(model).checkpoints
    return held.measured, held.planned, recomputed_in(onefold.placement(model).why, work.depth)


def test_the_buffer_of_inputs_is_as_long_as_the_blocks_that_are_computed_again_need() -> None:
    """The first step computed all of them again. The first block's input needs no gradient, and may have no room."""
    ((measured, planned, again),) = run_ranks(1, kept_inputs, WORK, 650_000)
    assert 2 < again < WORK.depth and planned <= measured <= again * WORK.rows * WORK.width * 4


def tried(work: Work, cases: list[tuple[int, float]], folder: str) -> list[Decided]:
    return [decided(work, *case, folder) for case in cases]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 2)])
def test_blocks_keep_what_fits_beside_state_that_the_host_cannot_hold(ranks: int, micro: int, tmp_path: Path) -> None:
    """The larger the budget, the fewer blocks are computed again; with a smaller host, more of them are."""
    work = WORK._replace(micro=micro)
    budgets = [650_000, 750_000, 900_000, 1_500_000] if ranks == 1 else [680_000, 760_000, 850_000, 1_500_000]
    cases = [(budget, share) for share in (2.0, 0.6) for budget in budgets]
    found = run_ranks(ranks, tried, work, cases, str(tmp_path))[0]
    for (budget, _), one in zip(cases, found, strict=True):
        assert not one.differs and one.auto.peak <= budget, (budget, one)
    again = [one.recomputed for one in found]
    large_host, small_host = again[:4], again[4:]
    assert large_host == sorted(large_host, reverse=True) and small_host == sorted(small_host, reverse=True)
    assert large_host[-1] == 0 < large_host[0] and sum(small_host) > sum(large_host)
    assert Tier.DEVICE in found[4].auto.tiers and set(found[3].auto.tiers) == {Tier.DEVICE}
