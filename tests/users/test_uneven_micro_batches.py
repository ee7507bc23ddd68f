"""Ranks with different numbers of micro-batches in a step: the last batch of an epoch, sequences packed by length."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.parity.training import same_bits

STEPS = ((3, 1), (1, 2), (2, 2), (1, 4))  # micro-batches by rank


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def train(
    stage: int,
    reduce: str | None,
    clip: bool,
    timeout_s: float = 20,
    offload: str | None = None,
    precision: str = "fp32",
) -> dict[str, Tensor]:
    model = onefold.shard(
        build(), stage=stage, bucket_bytes=64, timeout_s=timeout_s, offload=offload, precision=precision
    )
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    rank = dist.get_rank()
    for step, counts in enumerate(STEPS):
        for micro in range(counts[rank]):
            more = micro + 1 < counts[rank]
            with onefold.accumulate(model, reduce=reduce) if more else nullcontext():
                model(batch(step, micro, rank)).float().square().mean().backward()
        if clip:
            optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in onefold.full_state_dict(model).items()}


def plain(clip: bool) -> dict[str, Tensor]:
    """One process with the batches of both ranks, each rank's gradients divided by the number of ranks."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, counts in enumerate(STEPS):
        for rank, count in enumerate(counts):
            for micro in range(count):
                (model(batch(step, micro, rank)).square().mean() / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("clip", [False, True])
def test_ranks_with_fewer_micro_batches_wait_for_the_others(clip: bool) -> None:
    wanted = plain(clip)
    ways = [(0, None), (1, None), (2, "once"), (1, "each"), (2, None)]
    found = {way: run_ranks(2, train, *way, clip) for way in ways}
    for way, ranks in found.items():
        for name, value in wanted.items():
            assert all(torch.allclose(params[name], value, atol=1e-6) for params in ranks if params), (way, name)
    for one, other in [((0, None), (1, None)), ((1, None), (2, "once")), ((1, "each"), (2, None))]:
        assert all(same_bits(value, found[other][0][name]) for name, value in found[one][0].items()), (one, other)


def test_in_bf16_one_rank_may_leave_accumulate_out_and_stages_agree_bit_for_bit() -> None:
    wanted = plain(False)
    first = run_ranks(2, train, 0, None, False, precision="bf16")[0]
    assert all(torch.allclose(value, wanted[name], atol=0.02) for name, value in first.items())
    for way in [(1, None), (2, "once")]:
        found = run_ranks(2, train, *way, False, precision="bf16")[0]
        assert all(same_bits(value, found[name]) for name, value in first.items()), way


def test_ranks_with_fewer_micro_batches_wait_for_the_others_where_the_host_updates() -> None:
    found, wanted = run_ranks(2, train, 2, None, False, offload="host")[0], run_ranks(2, train, 2, None, False)[0]
    assert all(same_bits(value, found[name]) for name, value in wanted.items())


def test_stage_0_that_reduces_each_says_that_micro_batches_must_be_as_many() -> None:
    said = [str(error.message) for error in run_ranks_raises(2, train, 0, "each", False, 5)]
    assert any('accumulate(reduce="once")' in line and "equally many micro-batches" in line for line in said), said


def test_stage_3_says_that_micro_batches_must_be_as_many() -> None:
    said = [str(error.message) for error in run_ranks_raises(2, train, 3, None, False, 4)]
    assert all("equally many" in line and "micro-batches" in line for line in said), said
