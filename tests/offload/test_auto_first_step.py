"""Offload(optimizer="auto"): first steps that differ from those that follow. Whatever they hide, later ones stay within
the budget."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import OffloadError
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual

WIDTH = 64
ROWS = 400


class Trained(NamedTuple):
    peaks: list[int]  # bytes on the device in each step
    tiers: list[Tier]  # of each unit's optimizer state


def shard(model: nn.Module, device_bytes: int, **fields: Any) -> Any:
    onefold.init()
    offload = onefold.Offload(optimizer="auto", device_bytes=device_bytes, **fields.pop("host", {}))
    return onefold.shard(model, units=(Residual,), offload=offload, **fields)


def step(model: Any, adam: onefold.Optimizer, rows: int) -> int:
    """Bytes on the device at the peak."""
    dtype = engine_of(model).resolved.precision.compute
    with onefold.track_memory(model) as seen:
        model(torch.randn(rows, WIDTH).to(dtype)).float().square().mean().backward()
        adam.step()
        adam.zero_grad()
        engine_of(model).updates.wait()
    return seen.peak_bytes


def trained(model: Any, adam: onefold.Optimizer, rows: list[int]) -> Trained:
    peaks = [step(model, adam, count) for count in rows]
    return Trained(peaks, [unit.placement.optimizer_tier for unit in engine_of(model).units])


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Residual(WIDTH) for _ in range(count)))


def unfrozen(device_bytes: int) -> Trained:
    inner = blocks(6)
    inner[0].requires_grad_(False)
    inner[5].requires_grad_(False)
    model = shard(inner, device_bytes)
    model(torch.randn(ROWS, WIDTH))  # to see whether it runs
    model.requires_grad_(True)
    return trained(model, onefold.Optimizer(model, torch.optim.AdamW, step_in_backward=True), [ROWS] * 3)


def test_parameters_are_unfrozen_between_the_first_forward_and_the_first_step() -> None:
    device_bytes = 5_000_000
    (found,) = run_ranks(1, unfrozen, device_bytes)
    assert max(found.peaks) <= device_bytes and Tier.DEVICE in found.tiers, found


def by_formula(device_bytes: int) -> Trained:
    model = shard(blocks(12), device_bytes, stage=2)
    return trained(model, onefold.Muon(model, lr=1e-3, step_in_backward=True), [ROWS] * 3)


def test_state_that_the_first_backward_makes_counts_where_a_formula_has_placed_it() -> None:
    """Classes that need whole tensors are placed before the first step, which only looks whether that was right."""
    for device_bytes in (6_800_000, 7_000_000):
        (found,) = run_ranks(1, by_formula, device_bytes)
        assert max(found.peaks) <= device_bytes, (device_bytes, found)


def shorter(device_bytes: int, host_bytes: int, rows: list[int], folder: str) -> tuple[str, Trained]:
    """What refused the first step; and training with other batches after it."""
    host = {"host_bytes": host_bytes, "path": folder}
    model = shard(blocks(6), device_bytes, precision="bf16", host=host)
    adam, refused = onefold.Optimizer(model, torch.optim.AdamW, state="8bit"), ""
    try:
        step(model, adam, rows[0])
    except OffloadError as error:
        refused = str(error)
        adam.zero_grad()
    return refused, trained(model, adam, rows[1:])


def test_a_shorter_batch_after_a_refused_first_step_is_measured_anew(tmp_path: Any) -> None:
    """As the refusal advises."""
    device_bytes = 2_000_000
    ((refused, found),) = run_ranks(1, shorter, device_bytes, 200_000, [ROWS, 16, 16], str(tmp_path))
    assert "shorter micro-batches" in refused
    assert max(found.peaks) <= device_bytes and Tier.DEVICE in found.tiers, found


def warmed_up(device_bytes: int, stage: int) -> Trained:
    model = shard(blocks(6), device_bytes, stage=stage, precision="bf16", activations="auto")
    adam = onefold.Optimizer(model, torch.optim.AdamW)
    model(torch.randn(16, WIDTH).bfloat16()).float().square().mean().backward()
    adam.zero_grad()
    return trained(model, adam, [1024] * 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_small_batch_before_the_first_step_says_nothing_of_what_blocks_keep(stage: int) -> None:
    """Its gradients are dropped; what its first block keeps is taken times the rows of the batches that follow."""
    for device_bytes in (3_000_000, 5_000_000):
        (found,) = run_ranks(1, warmed_up, device_bytes, stage)
        assert max(found.peaks) <= 0.95 * device_bytes, (device_bytes, found)
