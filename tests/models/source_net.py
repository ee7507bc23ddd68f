"""The model whose checkpoints other libraries write in tests of imports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCAB = 11


class SourceNet(nn.Module):
    """Tied weights, a frozen parameter, a buffer, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 6)
        self.register_buffer("seen", torch.arange(3.0))
        self.a = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.b = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.norm(self.a(self.emb(tokens))) * self.scale))
