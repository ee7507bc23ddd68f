"""Ranks that run different blocks in the same step train without a hang, to the same bits at every stage."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import device
from tests.models import EndsFirst
from tests.nccl.programs import Picks, Program, chain, random_program, skipping
from tests.nccl.ranks import MARKS, RANKS, assert_one_digest, run_nccl
from tests.parity.training import batch_for

pytestmark = MARKS
WIDTH = 64
SETTINGS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, prefetch 0": {"stage": 3, "prefetch": 0},
    "stage 3, prefetch 2": {"stage": 3, "prefetch": 2},
}


def sharded(model: nn.Module, bucket_bytes: int, fields: dict[str, Any]) -> tuple[nn.Module, onefold.Optimizer]:
    model = onefold.shard(model.to(device()), bucket_bytes=bucket_bytes, **{"timeout_s": 20, **fields})
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)


def digest(model: nn.Module, said: Any) -> str:
    """Of the parameters, and of what rank 0 has `said` before."""
    with onefold.full_parameters(model):
        for param in model.parameters():
            said.update(param.detach().cpu().clone().numpy().tobytes())
    told = [said.hexdigest()]
    dist.broadcast_object_list(told, 0)
    return told[0]


def trained(program: Program, width: int, bucket_bytes: int, fields: dict[str, Any]) -> str:
    """On a rank: a digest of all losses and of the parameters at the end."""
    torch.manual_seed(0)
    picks = Picks()
    model, optimizer = sharded(chain(picks, width), bucket_bytes, fields)
    said = hashlib.sha256()
    for number, step in enumerate(program.steps):
        losses = []
        for micro, picks.ranks in enumerate(step):
            x = torch.randn(4, width, generator=batch_for(number, micro, dist.get_rank())).to(device())
            losses.append(model(x).square().mean())
            if not program.together:
                losses[-1].backward()
        if program.together:
            sum(losses).backward()
        said.update(repr([loss.item() for loss in losses]).encode() if dist.get_rank() == 0 else b"")
        optimizer.step()
        optimizer.zero_grad()
        if program.evaluated[number]:
            with torch.no_grad():
                model(x)
    return digest(model, said)


def at_all_settings(program: Program, width: int, bucket_bytes: int, names: list[str]) -> dict[str, str]:
    return {name: trained(program, width, bucket_bytes, SETTINGS[name]) for name in names}


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_skip_different_blocks_train_to_the_same_bits_at_every_stage(ranks: int) -> None:
    """Over NCCL the ranks of a stage 3 that gathered only what each of them needs would wait for each other forever."""
    assert_one_digest(run_nccl(ranks, at_all_settings, skipping(ranks), 256, 1 << 16, list(SETTINGS)))


def with_ends_first() -> dict[str, str]:
    digests = {}
    for name, fields in SETTINGS.items():
        torch.manual_seed(0)
        model, optimizer = sharded(EndsFirst(256, 5), 1 << 16, fields)
        for step in range(12):
            x = torch.randn(16, 64, generator=batch_for(step, 0, dist.get_rank())).to(device())
            model(x, (7 * step + 3 * dist.get_rank()) % 6).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        digests[name] = digest(model, hashlib.sha256())
    return digests


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_skip_blocks_of_a_net_whose_ends_share_a_unit(ranks: int) -> None:
    assert_one_digest(run_nccl(ranks, with_ends_first))


def run_programs(sent: list[Program], names: list[str]) -> list[dict[str, str]]:
    return [at_all_settings(program, WIDTH, 1 << 13, names) for program in sent]


@pytest.mark.parametrize("together", [False, True], ids=["several forwards", "one forward"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 10), (4, 4)])
def test_random_programs_give_the_same_bits_at_every_stage(ranks: int, count: int, together: bool) -> None:
    sent = [random_program(ranks, seed, together) for seed in range(count)]
    names = ["stage 0", "stage 2", "stage 3", "stage 3, prefetch 0"]
    found = run_nccl(ranks, run_programs, sent, names, timeout_s=120)
    for program, *digests in zip(sent, *found, strict=True):
        assert len({digest for rank in digests for digest in rank.values()}) == 1, (program, digests)
