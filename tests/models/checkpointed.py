"""Models that call torch's activation checkpointing themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models.plain import DIM, blocks


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

            def run(x: Tensor, part: Sequence[nn.Module] = part) -> Tensor:
                for layer in part:
                    x = self.drop(layer(x))
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedTwice(nn.Module):
    """One linear layer in two checkpoints, another in one."""

    def __init__(self, reentrant: bool, dim: int = DIM) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.twice, self.once = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for part in (self.twice, self.twice, self.once):
            x = checkpoint(lambda x, part=part: torch.tanh(part(x)), x, use_reentrant=self.reentrant)
        return x


class EachCheckpointed(nn.Module):
    """Blocks alone, each in a checkpoint of its own; in none where `reentrant` is None."""

    def __init__(self, layers: nn.ModuleList, reentrant: bool | None) -> None:
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


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


class Borrowing(nn.Module):
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
