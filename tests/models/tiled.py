"""Models with parts that may be computed over tiles of tokens: MLPs in blocks, and a loss behind a head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from tests.models.plain import DIM


class MlpBlock(nn.Module):
    """A norm and an MLP, added to the input."""

    def __init__(self, dim: int = DIM, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 8 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(8 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Speaking(nn.Module):
    """A language model that returns its loss, of whole logits or `tiled`, or what comes before the head (`hidden`)."""

    def __init__(self, vocab: int, way: str, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.way = way
        self.tokens, self.norm = nn.Embedding(vocab, DIM), nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(MlpBlock(drop=drop) for _ in range(2))
        self.head = nn.Linear(DIM, vocab, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.way == "hidden":
            return x
        if self.way == "plain":
            return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return onefold.tiled_cross_entropy(x, self.head.weight, tokens, bias=self.head.bias, shift=True, tokens=5)
