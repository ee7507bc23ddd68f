"""Layers that are dropped at random: stage 2 still holds a shard and a constant, and all stages the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onefold
from tests.harness import run_ranks
from tests.models import Dropping
from tests.parity.training import same_bits

DEPTH, WIDTH, STEPS = 16, 32, 8
UNIT_BYTES = WIDTH * WIDTH * 4


def train(stage: int, per_rank: bool) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    model = onefold.shard(Dropping(WIDTH, DEPTH, bias=False), stage=stage, bucket_bytes=UNIT_BYTES)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    rank = torch.distributed.get_rank()
    peaks = []
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step + (100 * rank if per_rank else 0))
        kept = (torch.rand(DEPTH, generator=dice) > 0.25).tolist() if step else [True] * DEPTH
        with onefold.track_memory(model) as tracker:
            model(torch.ones(2, WIDTH) * (rank + 1), kept).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        peak = tracker.peak()
        peaks.append(peak["gradients"] + peak["communication"])
    with onefold.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, peaks


@pytest.mark.parametrize("per_rank", [pytest.param(False, marks=pytest.mark.soak), True])
def test_dropping_layers_changes_neither_bits_nor_the_bound_on_memory(per_rank: bool) -> None:
    reference = run_ranks(2, train, 0, per_rank)
    for stage in (1, 2, 3):
        for rank, (params, peaks) in enumerate(run_ranks(2, train, stage, per_rank)):
            assert all(same_bits(value, reference[rank][0][name]) for name, value in params.items())
            if stage >= 2 and not per_rank:
                shard = DEPTH * UNIT_BYTES // 2
                assert max(peaks) <= shard + 8 * UNIT_BYTES, [peak / UNIT_BYTES for peak in peaks]
