"""Offload(optimizer="auto"): optimizer state that takes more for some parameters than for others. The budget holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onefold
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual

WIDTH, HIDDEN = 64, 1024
BLOCKS = 8  # and as many linear layers behind them, which are eight times as large


class Found(NamedTuple):
    peaks: list[int]  # bytes on the device in each step
    tiers: list[Tier]  # of each unit's optimizer state
    planned: list[int]  # bytes of each unit's optimizer state
    held: list[int]


def half_amsgrad(model: Any, inner: nn.Sequential, inside: bool) -> onefold.Optimizer:
    first, last = (list(part.parameters()) for part in (inner[:BLOCKS], inner[BLOCKS:]))
    groups = [{"params": first}, {"params": last, "amsgrad": True}]
    return onefold.Optimizer(model, torch.optim.AdamW, groups=groups, step_in_backward=inside)


def half_momentum(model: Any, inner: nn.Sequential, inside: bool) -> onefold.Optimizer:
    first, last = (list(part.parameters()) for part in (inner[:BLOCKS], inner[BLOCKS:]))
    groups = [{"params": first}, {"params": last, "momentum": 0.9}]
    return onefold.Optimizer(model, torch.optim.SGD, groups=groups, lr=1e-3, step_in_backward=inside)


def half_muon(model: Any, inner: nn.Sequential, inside: bool) -> onefold.Optimizer:
    place: Any = {f"{number}.*": "adamw" for number in range(BLOCKS, len(inner))}
    return onefold.Muon(model, lr=1e-3, place=place, step_in_backward=inside)


MAKE = {"amsgrad": half_amsgrad, "momentum": half_momentum, "muon": half_muon}


def trained(name: str, inside: bool, rows: int, device_bytes: int | None) -> Found:
    onefold.init()
    torch.manual_seed(0)
    linear = [nn.Linear(*((WIDTH, HIDDEN) if number % 2 == 0 else (HIDDEN, WIDTH))) for number in range(BLOCKS)]
    inner = nn.Sequential(*(Residual(WIDTH) for _ in range(BLOCKS)), *linear)
    offload = onefold.Offload(optimizer="auto", device_bytes=device_bytes) if device_bytes else None
    model = onefold.shard(inner, units=(Residual, nn.Linear), stage=3, precision="bf16", offload=offload)
    optimizer, peaks = MAKE[name](model, inner, inside), []
    for _ in range(3):
        with onefold.track_memory(model) as seen:
            model(torch.randn(rows, WIDTH).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine_of(model).updates.wait()
        peaks.append(seen.peak_bytes)
    engine = engine_of(model)
    tiers = [unit.placement.optimizer_tier for unit in engine.units]
    planned = [optimizer.planned_state(index, full=True)[0] for index in range(len(engine.units))]
    held = [sum(t.nbytes for t in one.state_tensors() if t.dim()) for one in optimizer.by_unit]
    return Found(peaks, tiers, planned, held)


def over(name: str, inside: bool, rows: int, fills: Sequence[float]) -> list[str]:
    """The budgets that a step has not kept, or beside which nothing is on the device."""
    full = max(trained(name, inside, rows, None).peaks)
    found = []
    for device_bytes in (int(fill * full) for fill in fills):
        auto = trained(name, inside, rows, device_bytes)
        if max(auto.peaks) > device_bytes or Tier.DEVICE not in auto.tiers:
            found.append(f"{name}, {inside=}, {rows} rows: {auto.peaks} of {device_bytes} ({full}), {auto.tiers}")
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", list(MAKE))
def test_state_of_param_groups_that_takes_more_counts(name: str, inside: bool) -> None:
    assert run_ranks(1, over, name, inside, 256 if inside else 8, [0.85, 0.9, 1.0]) == [[]]


@pytest.mark.parametrize("name", list(MAKE))
def test_the_planned_state_of_each_unit_is_what_it_takes(name: str) -> None:
    for found in run_ranks(2, trained, name, False, 8, None):
        assert found.planned == found.held and sum(found.held) > 0
