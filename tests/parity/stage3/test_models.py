"""Tied and borrowed weights, frozen layers and adapters train at stage 3 to the bits of stage 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.grids import thinned
from tests.models import DIM, Adapted, AdaptedBlock, Language, Stack, blocks
from tests.parity.stage3.compare import Case, assert_equal, differences

VOCAB = 40


def spelled(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss


LANGUAGES = (
    "plain", "tied", "tied to a block", "embedding used as head", "head taken at the start",
    "block's weight taken at the start", "block's weight taken behind it", "view of a block's weight taken behind it",
)  # fmt: skip


def language(trait: str) -> list[str]:
    return differences(Case(lambda: Language(VOCAB, trait=trait), spelled))


@pytest.mark.parametrize(("trait", "ranks"), thinned(LANGUAGES, [2, 3]))
def test_a_parameter_may_be_used_outside_its_own_module(trait: str, ranks: int) -> None:
    assert_equal(ranks, language, trait)


@pytest.mark.parametrize(("trait", "ranks"), thinned(["plain", "tied"], [1, 4]))
def test_one_and_four_ranks_train_a_language_model(trait: str, ranks: int) -> None:
    assert_equal(ranks, language, trait)


def partly_frozen(which: tuple[int, ...]) -> nn.Module:
    """A block first, in the middle, or last runs with nothing trained in it."""
    model = Stack(blocks(4), nn.Linear(DIM, 3))
    for index in which:
        model.layers[index].requires_grad_(False)
    return model


FROZEN: dict[str, Callable[[], nn.Module]] = {
    **{f"frozen {which}": (lambda w=which: partly_frozen(w)) for which in [(0,), (0, 1), (1, 2), (3,), (0, 1, 2, 3)]},
    "adapters": lambda: nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Linear(DIM, 2)),
    "adapted blocks": lambda: nn.Sequential(*[AdaptedBlock() for _ in range(3)]),
}


def frozen(name: str) -> list[str]:
    return differences(Case(FROZEN[name]))


@pytest.mark.parametrize(("name", "ranks"), thinned(FROZEN, [2, 3]))
def test_frozen_layers_and_adapters_are_spread_too(name: str, ranks: int) -> None:
    assert_equal(ranks, frozen, name)
