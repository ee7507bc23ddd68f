"""Offload(optimizer="auto") with a path: host memory stays within host_bytes, or a warning says that it may not.

In the first step gradients may take more, with which the device fills up in that step only.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

import onefold
from onefold.errors import PlacementWarning
from onefold.model.storage import storage_bytes
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import host_tensors
from tests.harness import run_ranks
from tests.offload.test_auto import Work, build, step, tiers_of


def drawn(seed: int) -> tuple[Work, int, int]:
    """A model, and budgets of the device and of the host that reach from too little to more than enough."""
    rng = random.Random(seed)
    work = Work(
        depth=rng.randint(3, 8), width=64, rows=rng.choice([1, 16]), inside=rng.random() < 0.5,
        precision=rng.choice(["fp32", "bf16"]), clip=False,
    )  # fmt: skip
    numel = 16_640 * work.depth
    return work, int(numel * rng.uniform(6, 20)), int(numel * rng.uniform(3, 16)) + 100_000


def over(folder: str, seeds: list[int]) -> list[Any]:
    """What was over its budget without a warning, how often state was on disk, and how often a warning came."""
    wrong, on_disk, warned = list[str](), 0, 0
    for seed in seeds:
        work, device_bytes, host_bytes = drawn(seed)
        offload = onefold.Offload(optimizer="auto", device_bytes=device_bytes, host_bytes=host_bytes, path=folder)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            model, adam = build(work, offload)
            held = []
            for number in range(3):
                step(model, adam, work, number)
                engine_of(model).updates.wait()
                held.append(sum(storage_bytes(tensors) for tensors in host_tensors(engine_of(model)).values()))
        told = [str(one.message) for one in heard if issubclass(one.category, PlacementWarning)]
        told = [text for text in told if "a step may take" in text]
        if max(held[1:]) > host_bytes and not told:
            wrong.append(f"{seed}: {held} bytes of {host_bytes}, {work}: {onefold.placement(model).why}")
        on_disk += "disk" in {tier.value for tier in tiers_of(model)}
        warned += bool(told)
    return [wrong, on_disk, warned]


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1000, 2000, 3000, 4000))])
def test_host_memory_stays_within_its_budget_or_a_warning_comes(first: int, tmp_path: Any) -> None:
    seeds = list(range(first, first + 20))
    ((wrong, on_disk, warned),) = run_ranks(1, over, str(tmp_path), seeds, timeout_s=300)
    assert wrong == []
    assert 0 < warned < on_disk < len(seeds), "budgets were to reach from too little to more than enough"
