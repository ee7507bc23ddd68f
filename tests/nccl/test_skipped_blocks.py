"""Ranks that run different blocks in the same step train without a hang, to the same bits at every stage."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import device
from tests.models import Chain, Residual
from tests.nccl.ranks import MARKS, RANKS, assert_one_digest, run_nccl
from tests.parity.training import batch_for

pytestmark = MARKS
WIDTH, BLOCKS = 64, 5
SETTINGS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, prefetch 0": {"stage": 3, "prefetch": 0},
    "stage 3, prefetch 2": {"stage": 3, "prefetch": 2},
}

Step = list[list[list[int]]]  # forwards of a step: for each the blocks that each rank runs


@dataclass(frozen=True)
class Program:
    """What all ranks run in every step, and which steps are followed by an evaluation of the last forward."""

    steps: list[Step]
    evaluated: list[bool]
    together: bool  # one backward of all forwards, or one each


def skipping(ranks: int, steps: int = 12) -> Program:
    """Every rank skips another block in every step, and sometimes none: 6 choices for 5 blocks."""
    kept = [
        [[[b for b in range(BLOCKS) if b != (7 * step + 3 * rank) % 6] for rank in range(ranks)]]
        for step in range(steps)
    ]
    return Program(kept, [False] * steps, together=True)


def random_program(ranks: int, seed: int, together: bool) -> Program:
    """In each forward, all ranks keep one order of blocks, of which each skips some and runs some twice in a row."""
    dice = random.Random(seed)

    def forward() -> list[list[int]]:
        return [[b for b in range(BLOCKS) for _ in range(dice.choice([0, 1, 1, 2]))] for _ in range(ranks)]

    steps = [[forward() for _ in range(1 if together else dice.randint(1, 2))] for _ in range(dice.randint(2, 3))]
    return Program(steps, [dice.random() < 0.5 for _ in steps], together)


class Picks:
    """The blocks that the next forward of a rank runs."""

    def __init__(self) -> None:
        self.ranks: list[list[int]] = []

    def __call__(self, step: int, rank: int) -> list[int]:
        return self.ranks[rank]


def trained(program: Program, width: int, bucket_bytes: int, fields: dict[str, Any]) -> str:
    """On a rank: a digest of all losses and of the parameters at the end."""
    torch.manual_seed(0)
    picks = Picks()
    layers = nn.ModuleList(Residual(width) for _ in range(BLOCKS))
    model = Chain(picks, layers, nn.Linear(width, 8), nn.Linear(width, width)).to(device())
    onefold.shard(model, bucket_bytes=bucket_bytes, **{"timeout_s": 20, **fields})
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
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
    with onefold.full_parameters(model):
        for param in model.parameters():
            said.update(param.detach().cpu().clone().numpy().tobytes())
    told = [said.hexdigest()]
    dist.broadcast_object_list(told, 0)  # rank 0 has its losses in it; the parameters are everyone's
    return told[0]


def at_all_settings(program: Program, width: int, bucket_bytes: int, names: list[str]) -> dict[str, str]:
    return {name: trained(program, width, bucket_bytes, SETTINGS[name]) for name in names}


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_skip_different_blocks_train_to_the_same_bits_at_every_stage(ranks: int) -> None:
    """Over NCCL the ranks of a stage 3 that gathered only what each of them needs would wait for each other forever."""
    assert_one_digest(run_nccl(ranks, at_all_settings, skipping(ranks), 256, 1 << 16, list(SETTINGS)))


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
