"""activations="auto" counts what else needs the device: optimizer state as it is, sums, and a budget."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.activations import automatic
from tests.harness import run_ranks
from tests.models import Residual

WIDTH, DEPTH = 32, 6


def rooms(settings: list[tuple[dict[str, Any], str, bool]]) -> list[int]:
    """The room that each model's first block finds: with settings of shard(), the form of its optimizer state, and
    whether gradients accumulate."""
    onefold.init()
    found: list[int] = []
    for fields, state, accumulates in settings:
        model = nn.Sequential(*(Residual(WIDTH) for _ in range(DEPTH)))
        onefold.shard(model, stage=3, precision="bf16", activations="auto", units=(Residual,), **fields)
        adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, state=state)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(automatic, "room_left", heard(automatic.room_left, found))
            with onefold.accumulate(model) if accumulates else nullcontext():
                model(torch.randn(4, WIDTH).bfloat16()).float().sum().backward()
        adam.zero_grad()
    return found


def heard(function: Any, found: list[int]) -> Any:
    def run(*given: Any, **named: Any) -> int:
        found.append(function(*given, **named))
        return found[-1]

    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_smaller_state_and_parameters_elsewhere_leave_more_room_for_activations(ranks: int) -> None:
    away = {"offload": onefold.Offload(optimizer="host", parameters="host")}
    budget = {"offload": onefold.Offload(optimizer="auto", device_bytes=1 << 20)}
    settings = [({}, "fp32", False), ({}, "bf16", False), ({}, "8bit", False), (away, "fp32", False),
                (budget, "fp32", False), ({}, "fp32", True)]  # fmt: skip
    for fp32, bf16, small, elsewhere, bounded, summed in run_ranks(ranks, rooms, settings):
        numel = sum(p.numel() for p in nn.Sequential(*(Residual(WIDTH) for _ in range(DEPTH))).parameters()) / ranks
        # two moments: of 4, 2 and 1 bytes; padding makes more elements of the parameters, and 8 bits have scales
        assert 3.9 * numel < bf16 - fp32 < 5 * numel
        assert 1.5 * numel < small - bf16 < 2.5 * numel
        assert elsewhere - fp32 > 12 * numel
        assert bounded < 1 << 20 < fp32 and summed <= fp32
