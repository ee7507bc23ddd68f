"""Offload(optimizer="auto") without a disk, on a host that cannot hold what a device filled from the front leaves to
it. A large last unit needs large buffers there: with its state on the device, and more of the others in host memory,
all of them fit."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onefold
from onefold.offload.host_memory import available_bytes
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual

WIDTH, BLOCKS, WIDE = 64, 40, 2048


class Run(NamedTuple):
    params: dict[str, Any]
    tiers: list[Tier]  # of the blocks' state, and of the head's


def trained(rows: int, activations: Any, offload: Any) -> Run:
    onefold.init()
    torch.manual_seed(0)
    inner = nn.Sequential(*(Residual(WIDTH) for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDE))
    model = onefold.shard(
        inner, units=(Residual, nn.Linear), stage=3, precision="bf16", activations=activations, offload=offload
    )
    adam = onefold.Optimizer(model, torch.optim.AdamW)
    for _ in range(2):
        model(torch.randn(rows, WIDTH).bfloat16()).float().square().mean().backward()
        adam.step()
        adam.zero_grad()
    tiers = [unit.placement.optimizer_tier for unit in engine_of(model).units]
    return Run(onefold.full_state_dict(model), tiers)


def beside(host_bytes: int, device_bytes: int, rows: int, activations: Any) -> tuple[list[Tier], bool]:
    """The tiers where the host has `host_bytes`, and whether bits are those without offload."""
    there = trained(rows, activations, None)
    ranks = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(available_bytes() // host_bytes)  # each rank has its part of the host
    try:
        auto = trained(rows, activations, onefold.Offload(optimizer="auto", device_bytes=device_bytes))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = ranks
    return auto.tiers, all(torch.equal(there.params[name], auto.params[name]) for name in there.params)


@pytest.mark.parametrize(
    ("host_bytes", "device_bytes", "rows", "activations"),
    [(6_500_000, 7_000_000, 2, "keep"), (7_000_000, 7_500_000, 64, "checkpoint"), (7_000_000, 7_500_000, 64, "auto")],
)
def test_the_unit_that_needs_the_largest_buffers_stays_on_the_device_where_the_host_has_too_little(
    host_bytes: int, device_bytes: int, rows: int, activations: str
) -> None:
    ((tiers, same),) = run_ranks(1, beside, host_bytes, device_bytes, rows, activations)
    assert tiers[-1] is Tier.DEVICE and tiers.count(Tier.HOST) > BLOCKS / 2, tiers
    assert same


def test_where_the_host_has_enough_the_first_units_stay() -> None:
    ((tiers, same),) = run_ranks(1, beside, 12_000_000, 7_000_000, 2, "keep")
    assert tiers == sorted(tiers, key=[Tier.DEVICE, Tier.HOST].index) and len(set(tiers)) == 2, tiers
    assert same
