"""Activation checkpointing recomputes blocks inside backward, where their parameters have been released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.harness.grids import thinned
from tests.parity.stage3.compare import DIM, Case, Turn, assert_equal, batch, blocks, differences


class Checkpointed(nn.Module):
    """Four blocks in checkpoints of `span` blocks each; with `again`, the first checkpoint's blocks run once more."""

    def __init__(self, span: int, again: bool, reentrant: bool) -> None:
        super().__init__()
        self.span, self.again, self.reentrant = span, again, reentrant
        self.first, self.layers, self.head = nn.Linear(DIM, DIM), blocks(4), nn.Linear(DIM, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        parts = [self.layers[start : start + self.span] for start in range(0, 4, self.span)]
        for part in [*parts, *(parts[:1] if self.again else [])]:

            def run(x: Tensor, part: Any = part) -> Tensor:
                for layer in part:
                    x = self.drop(layer(x))
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers, self.head = blocks(3), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.layers[1](x)

        def outer(x: Tensor) -> Tensor:
            x = checkpoint(inner, self.layers[0](x), use_reentrant=self.reentrant)
            return self.layers[2](x)

        return self.head(checkpoint(outer, x, use_reentrant=self.reentrant))


class Halves(nn.Module):
    """All but the head in one checkpoint, through checkpoint_sequential in two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.body, self.head = reentrant, nn.Sequential(*blocks(4)), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=self.reentrant))


class Bare(nn.Module):
    """What is recomputed uses a parameter of the root, a block, and a weight that belongs to another module."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.layers, self.head = reentrant, blocks(2), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.layers[0](x * self.scale) @ self.head.weight

        x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(self.layers[1](x))


BUILDS: dict[str, Any] = {
    "one block each": lambda r: Checkpointed(1, False, r),
    "two blocks each": lambda r: Checkpointed(2, False, r),
    "all blocks in one": lambda r: Checkpointed(4, False, r),
    "a block in two checkpoints": lambda r: Checkpointed(1, True, r),
    "two blocks in two checkpoints": lambda r: Checkpointed(2, True, r),
    "nested": Nested,
    "sequential": Halves,
    "other modules' parameters": Bare,
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
