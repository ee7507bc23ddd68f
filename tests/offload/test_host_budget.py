"""Offload(optimizer="auto") with a path: host memory stays within host_bytes, or a warning says that it may not.

In the first step gradients may take more, with which the device fills up in that step only.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

import onefold
from onefold.errors import OffloadError, PlacementWarning, StateError
from onefold.model.storage import storage_bytes
from onefold.optim.disk_room import DiskRoom
from onefold.optim.host_update import HostUpdates
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import host_tensors
from tests.harness import run_ranks
from tests.offload.test_auto import Outcome, Work, build, differing, step, tiers_of, train


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
    seeds = list(range(first, first + 30))
    ((wrong, on_disk, warned),) = run_ranks(1, over, str(tmp_path), seeds, timeout_s=300)
    assert wrong == []
    assert 0 < warned < on_disk < len(seeds), "budgets were to reach from too little to more than enough"


def disturbed(method: tuple[type, str], error: BaseException, folder: str) -> tuple[list[str], int, int]:
    """What differs between a run without offload and one whose first step() ended with this error, was called again,
    and ends then; and bytes on the device at the peak and of the budget. No other call is allowed in between."""
    cls, name = method
    work = Work(depth=8, width=64, rows=4, stage=2, inside=True)  # parameters are on the device: units may wait
    plain = train(work, None)
    budget = int(0.9 * plain.peak)
    model, adam = build(work, onefold.Offload(optimizer="auto", device_bytes=budget, host_bytes=1 << 20, path=folder))
    whole, calls = getattr(cls, name), []

    def failing(*given: Any, **named: Any) -> None:
        whole(*given, **named)
        calls.append(name)
        if len(calls) == 1:
            raise error

    setattr(cls, name, failing)
    with onefold.track_memory(model) as seen:
        try:
            with pytest.raises(type(error)):
                step(model, adam, work, 0)
        finally:
            setattr(cls, name, whole)
        with pytest.raises(StateError, match="step"):
            onefold.save(folder, model, adam)
        adam.step()
        adam.zero_grad()
        losses = [0.0, *(step(model, adam, work, number) for number in (1, 2))]
        engine_of(model).updates.wait()
    losses[0] = plain.losses[0]
    found = Outcome(losses, onefold.full_state_dict(model), 0, [], [], "", [])
    return differing(plain, found), seen.peak_bytes, budget


@pytest.mark.parametrize(
    ("method", "error"),
    [((HostUpdates, "end_waiting"), KeyboardInterrupt()), ((DiskRoom, "check"), OffloadError("no room"))],
    ids=["interrupted", "refused"],
)
def test_a_first_step_that_ended_early_can_be_called_again(method: Any, error: BaseException, tmp_path: Any) -> None:
    ((differs, peak, budget),) = run_ranks(1, disturbed, method, error, str(tmp_path))
    assert differs == [] and peak <= budget, (differs, peak, budget)
