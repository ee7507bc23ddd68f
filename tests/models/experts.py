"""A mixture of experts as large models store it: all experts' matrices in one tensor, and q, k and v in another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.transformers import GPT_DIM, GPT_VOCAB

EXPERTS = 3


class StackedBlock(nn.Module):
    def __init__(self, dim: int = GPT_DIM) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)  # one half of rows gates the other
        self.router = nn.Linear(dim, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * dim, dim) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, dim, 2 * dim) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.mix(self.norm(x)).chunk(2, dim=-1)
        x = x + gate.sigmoid() * value
        weights = self.router(x).softmax(-1)
        each = torch.einsum("bteh,edh->bted", F.gelu(torch.einsum("btd,ehd->bteh", x, self.up)), self.down)
        return x + torch.einsum("bted,bte->btd", each, weights)


class StackedExperts(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(GPT_VOCAB, GPT_DIM)
        self.layers = nn.ModuleList(StackedBlock() for _ in range(layers))
        self.head = nn.Linear(GPT_DIM, GPT_VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
