"""Tied and borrowed weights, frozen layers and adapters train at stage 3 to the bits of stage 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.grids import thinned
from tests.parity.stage3.compare import DIM, Case, assert_equal, blocks, differences

VOCAB = 40


class Language(nn.Module):
    """Embedding, blocks, head; `trait` says what is odd about it."""

    def __init__(self, trait: str) -> None:
        super().__init__()
        self.trait = trait
        self.tokens, self.layers, self.norm = nn.Embedding(VOCAB, DIM), blocks(3), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if trait == "tied":
            self.head.weight = self.tokens.weight
        if trait == "tied to a block":
            self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, tokens: Tensor) -> Tensor:
        early = self.head.weight.t() if self.trait == "head taken at the start" else None
        first = self.layers[0].up.weight if self.trait == "block's weight taken at the start" else None
        x = self.tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.trait == "block's weight taken behind it":
                first = self.layers[0].up.weight
            if index == 0 and self.trait == "view of a block's weight taken behind it":
                first = self.layers[0].up.weight.t().t()
        x = self.norm(x)
        if first is not None:
            x = x + torch.tanh(F.linear(x, first)[..., :DIM])
        if self.trait == "embedding used as head":
            return F.linear(x, self.tokens.weight) + self.head(x)
        return self.head(x) if early is None else x @ early


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
    return differences(Case(lambda: Language(trait), spelled))


@pytest.mark.parametrize(("trait", "ranks"), thinned(LANGUAGES, [2, 3]))
def test_a_parameter_may_be_used_outside_its_own_module(trait: str, ranks: int) -> None:
    assert_equal(ranks, language, trait)


@pytest.mark.parametrize(("trait", "ranks"), thinned(["plain", "tied"], [1, 4]))
def test_one_and_four_ranks_train_a_language_model(trait: str, ranks: int) -> None:
    assert_equal(ranks, language, trait)


class Uneven(nn.Module):
    """A block first, in the middle, or last runs with nothing trained in it; adapters beside frozen weights."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.head = blocks(4), nn.Linear(DIM, 3)
        for index in frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Adapted(nn.Module):
    """LoRA: a frozen weight, a trained pair of thin ones."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / 4, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, dim)), nn.Parameter(torch.zeros(dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + x @ self.a.t() @ self.b.t()


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.query(x)) * self.value(x)


FROZEN: dict[str, Callable[[], nn.Module]] = {
    **{f"frozen {which}": (lambda w=which: Uneven(w)) for which in [(0,), (0, 1), (1, 2), (3,), (0, 1, 2, 3)]},
    "adapters": lambda: nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Linear(DIM, 2)),
    "adapted blocks": lambda: nn.Sequential(*[AdaptedBlock() for _ in range(3)]),
}


def frozen(name: str) -> list[str]:
    return differences(Case(FROZEN[name]))


@pytest.mark.parametrize(("name", "ranks"), thinned(FROZEN, [2, 3]))
def test_frozen_layers_and_adapters_are_spread_too(name: str, ranks: int) -> None:
    assert_equal(ranks, frozen, name)
