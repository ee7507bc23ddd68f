"""A language model whose attention is a function that it is given: across ranks, or of one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import onefold

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]  # q, k, v, documents


class GroupedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.key_heads, self.attend = heads, key_heads, attend
        width = dim // heads
        self.q, self.kv = nn.Linear(dim, heads * width), nn.Linear(dim, 2 * key_heads * width)
        self.out = nn.Linear(heads * width, dim)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.key_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v, documents).transpose(1, 2).flatten(2))


class LongBlock(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int, attend: Attend) -> None:
        super().__init__()
        self.attention, self.norm = GroupedAttention(dim, heads, key_heads, attend), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), documents)
        return x + self.down(torch.relu(self.up(x)))


class LongLanguage(nn.Module):
    """Gives the sum of the losses of tokens that count."""

    def __init__(self, attend: Attend, heads: int, key_heads: int, dim: int = 12, vocab: int = 19) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(LongBlock(dim, heads, key_heads, attend) for _ in range(2))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, documents)
        return onefold.tiled_cross_entropy(x, self.head.weight, shift_labels, tokens=8, reduction="sum")
