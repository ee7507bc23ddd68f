"""Ranks may skip, repeat and reorder blocks, and route tokens to experts, alike or each in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import RankFailure, run_ranks
from tests.harness.grids import thinned
from tests.models import DIM, Chain, Expert, Mixture, Pick, Stack, blocks
from tests.parity.stage3.compare import Case, assert_equal, batch, differences


def chain(pick: Pick) -> Chain:
    return Chain(pick, first=nn.Linear(DIM, DIM), layers=blocks(4), head=nn.Linear(DIM, 3))


def stepped(model: nn.Module, step: int) -> Tensor:
    model.step = step
    loss = model(batch(step)).square().mean()
    loss.backward()
    return loss


PICKS: dict[str, Pick] = {
    "all": lambda step, rank: [0, 1, 2, 3],
    "one skipped": lambda step, rank: [0, 1, 3],
    "first and last skipped": lambda step, rank: [1, 2],
    "none": lambda step, rank: [],
    "one skipped, another on each rank": lambda step, rank: [i for i in range(4) if i != rank],
    "skipped by turns": lambda step, rank: [i for i in range(4) if i != step % 4],
    "skipped by turns, another on each rank": lambda step, rank: [i for i in range(4) if i != (step + rank) % 4],
    "one block each, another on each rank": lambda step, rank: [(step + rank) % 4],
    "skipped from step 2 on": lambda step, rank: [0, 1, 2, 3] if step < 2 else [0, 3],
    "run from step 2 on": lambda step, rank: [0, 3] if step < 2 else [0, 1, 2, 3],
    "against registration": lambda step, rank: [3, 2, 1, 0],
    "turned around at step 2": lambda step, rank: [0, 1, 2, 3] if step < 2 else [3, 2, 1, 0],
    "shuffled at every step": lambda step, rank: torch.randperm(4, generator=_seeded(step)).tolist(),
    "run twice": lambda step, rank: [0, 1, 0, 2, 1, 3],
    "run twice in a row": lambda step, rank: [0, 1, 1, 2, 3, 3],
    "run twice in a row on rank 0 only": lambda step, rank: [0, 1, 1, 2] if rank == 0 else [0, 1, 2],
    "run twice from step 2 on": lambda step, rank: [0, 1, 2, 3] if step < 2 else [0, 1, 2, 0, 1, 3],
}


APART: dict[str, Pick] = {  # what one list of gathers cannot hold
    "run twice on rank 0 only": lambda step, rank: [0, 1, 0, 2] if rank == 0 else [0, 1, 2],
    "another order on each rank": lambda step, rank: [0, 1, 2, 3] if rank == 0 else [3, 2, 1, 0],
}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picked(name: str, **fields: Any) -> list[str]:
    return differences(Case(lambda: chain({**PICKS, **APART}[name]), stepped, steps=5), **fields)


@pytest.mark.parametrize(("name", "ranks"), thinned(PICKS, [2, 3]))
def test_blocks_may_be_skipped_repeated_and_reordered(name: str, ranks: int) -> None:
    assert_equal(ranks, picked, name)


@pytest.mark.parametrize("name", ["skipped by turns, another on each rank", "run twice"])
def test_four_ranks_skip_and_repeat_too(name: str) -> None:
    assert_equal(4, picked, name)


def impatient(name: str) -> list[str]:
    return picked(name, bucket_bytes=1 << 20, timeout_s=3.0)  # of a machine that may be busy


@pytest.mark.parametrize("name", APART)
def test_ranks_too_far_apart_get_an_error_that_names_the_unit_or_the_right_bits(name: str) -> None:
    try:
        found = run_ranks(2, impatient, name)
    except RankFailure as failure:
        assert "CommError" in str(failure) and "gather-forward of layers." in str(failure)
    else:
        assert found == [[], []]


def mixtures() -> Stack:
    return Stack(nn.ModuleList(Mixture() for _ in range(3)), nn.Linear(DIM, 4))


def routed(experts_are_units: bool) -> list[str]:
    return differences(Case(mixtures, fields={"units": Expert} if experts_are_units else {}))


@pytest.mark.parametrize(("experts_are_units", "ranks"), thinned([False, True], [2, 3]))
def test_an_expert_may_get_no_tokens_on_some_ranks(experts_are_units: bool, ranks: int) -> None:
    assert_equal(ranks, routed, experts_are_units)
