"""Stage 3 over NCCL does what stage 0 does: odd models, odd training loops, whole parameters, generation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.models import GPT, Branches, Counting, Detached, Positions, Repeated, Returning, Tied
from tests.nccl.ranks import MARKS, run_nccl
from tests.parity.stage3.compare import Case, batch, differences, learn
from tests.parity.stage3.test_branches import PICKS, chain, stepped
from tests.parity.stage3.test_loops import TURNS

pytestmark = MARKS


def branching(model: nn.Module, step: int) -> Tensor:
    """Which parameters have a gradient differs by rank and step."""
    loss = model(batch(step), [(step + dist.get_rank()) % 4]).square().mean()
    loss.backward()
    return loss


def returned_parameter(model: nn.Module, step: int) -> Tensor:
    """The loss takes a parameter that forward returned."""
    y, alone = model(batch(step))
    loss = y.square().mean() + alone.square().sum()
    loss.backward()
    return loss


def written(model: nn.Module, step: int) -> Tensor:
    """All ranks read a parameter and write it between steps."""
    with onefold.full_parameters(model, write=True), torch.no_grad():
        seen = model.decode.weight.abs().sum().clone()
        model.decode.weight.mul_(1 + 0.01 * step)
    return learn(model, step) + seen


def generating(model: nn.Module, step: int) -> Tensor:
    """A step on tokens, then greedy generation; stage 3 gathers every block for every token."""
    tokens = (batch(step, 2, 5).abs() * 10).long()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    model.train()
    return loss + tokens.sum()


def fed(model: nn.Module, step: int) -> Tensor:
    """As `learn`, for a model of width 32."""
    loss = model(batch(step, 3, 32)).square().mean()
    loss.backward()
    return loss


BEHAVIOURS: dict[str, Case] = {
    "tied weights": Case(Tied),
    "a submodule called twice": Case(Repeated),
    "a weight used in and out of the graph": Case(Detached, fed),
    "parameters without gradient, by rank and step": Case(Branches, branching, steps=5),
    "a parameter returned from forward": Case(lambda: Returning("parameter"), returned_parameter),
    "a view of a parameter taken by one module and used by another": Case(Positions),
    "full parameters read and written": Case(Tied, written),
    "generation": Case(GPT, generating),
}
CASES = {
    **BEHAVIOURS,
    **{f"loop: {name}": Case(Counting, turn) for name, turn in TURNS.items()},
    **{f"blocks: {name}": Case(partial(chain, pick), stepped, steps=4) for name, pick in PICKS.items()},
}
PATIENCE_S = 30.0  # of one message, which waits for the other ranks' turns on the GPU


def compared(names: list[str], **fields: Any) -> dict[str, list[str]]:
    """On a rank: for each case, what stage 3 did not do as stage 0 did."""
    return {name: differences(CASES[name], timeout_s=PATIENCE_S, **fields) for name in names}


def assert_none_differs(ranks: int, names: list[str], **fields: Any) -> None:
    for rank, found in enumerate(run_nccl(ranks, compared, names, timeout_s=120, **fields)):
        assert {name: what for name, what in found.items() if what} == {}, f"rank {rank}"


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_stage_3_does_what_stage_0_does(name: str) -> None:
    assert_none_differs(2, [name])


def test_behaviours_are_the_same_on_four_ranks() -> None:
    assert_none_differs(4, list(BEHAVIOURS))


@pytest.mark.parametrize("name", TURNS)
def test_every_training_loop_gives_the_same_bits(name: str) -> None:
    assert_none_differs(2, [f"loop: {name}"])


def test_blocks_may_be_skipped_repeated_and_reordered() -> None:
    assert_none_differs(2, [f"blocks: {name}" for name in PICKS])


SETTINGS: list[dict[str, Any]] = [
    {"prefetch": 0}, {"prefetch": 2}, {"keep_whole": 300}, {"bucket_bytes": 1 << 20}, {"reshard_after_forward": False},
]  # fmt: skip


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_no_setting_of_stage_3_changes_a_bit(fields: dict[str, Any]) -> None:
    names = ["generation", "loop: evaluated", "blocks: skipped by turns, another on each rank"]
    assert_none_differs(2, names, **fields)
