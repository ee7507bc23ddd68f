"""Activation checkpointing recomputes blocks inside backward, where their parameters have been released."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.grids import thinned
from tests.models import Borrowing, Checkpointed, Halves, Nested, blocks
from tests.parity.stage3.compare import Case, Turn, assert_equal, batch, differences

BUILDS: dict[str, Any] = {
    "one block each": lambda r: Checkpointed(1, False, r),
    "two blocks each": lambda r: Checkpointed(2, False, r),
    "all blocks in one": lambda r: Checkpointed(4, False, r),
    "a block in two checkpoints": lambda r: Checkpointed(1, True, r),
    "two blocks in two checkpoints": lambda r: Checkpointed(2, True, r),
    "nested": Nested,
    "sequential": Halves,
    "other modules' parameters": Borrowing,
}


def learn(model: nn.Module, step: int) -> Tensor:
    loss = model(batch(step).requires_grad_()).square().mean()
    loss.backward()
    return loss


def accumulate_twice(model: nn.Module, step: int) -> Tensor:
    return sum(learn(model, 2 * step + i).detach() for i in range(2))


def checkpointed(name: str, reentrant: bool, turn: Turn = learn, **fields: Any) -> list[str]:
    return differences(Case(lambda: BUILDS[name](reentrant), turn), **fields)


@pytest.mark.parametrize(("name", "reentrant", "ranks"), thinned(BUILDS, [False, True], [2, 3]))
def test_checkpointed_blocks_train_to_the_same_bits(name: str, reentrant: bool, ranks: int) -> None:
    assert_equal(ranks, checkpointed, name, reentrant)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    thinned(["two blocks each", "a block in two checkpoints", "other modules' parameters"], [False, True]),
)
def test_checkpointed_blocks_may_run_in_two_backwards_of_a_step(name: str, reentrant: bool) -> None:
    assert_equal(2, checkpointed, name, reentrant, accumulate_twice)


@pytest.mark.parametrize(("prefetch", "reentrant"), thinned([0, 3], [False, True]))
def test_checkpoints_work_at_any_look_ahead_with_one_unit_per_block(prefetch: int, reentrant: bool) -> None:
    for name in ("two blocks each", "two blocks in two checkpoints"):
        assert_equal(2, checkpointed, name, reentrant, prefetch=prefetch, bucket_bytes=1 << 20)


def around(model: nn.Module, step: int) -> Tensor:
    """The whole model in two checkpoints of one loss."""
    x = batch(step).requires_grad_()
    loss = sum(checkpoint(model, x * i, use_reentrant=False).square().mean() for i in (1, 2))
    loss.backward()
    return loss


def outside() -> list[str]:
    return differences(Case(lambda: nn.Sequential(*blocks(3)), around))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_may_hold_the_whole_model(ranks: int) -> None:
    assert_equal(ranks, outside)
