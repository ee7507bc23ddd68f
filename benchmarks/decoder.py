"""Decoders of Qwen2.5's shapes in plain PyTorch: grouped queries, rotary positions, gated MLPs. One over sequences that
a mesh may cut, with a tiled loss; and one over whole sequences, with the interface of gpt.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import onefold

ROTARY_BASE = 1e6


@dataclass(frozen=True, kw_only=True)
class Sizes:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    vocab: int
    tied: bool = False


SHAPES = {
    "tiny": Sizes(layers=2, hidden=64, intermediate=128, heads=4, key_heads=2, vocab=512),
    "1.5b": Sizes(layers=28, hidden=1536, intermediate=8960, heads=12, key_heads=2, vocab=151936, tied=True),
    "7b": Sizes(layers=28, hidden=3584, intermediate=18944, heads=28, key_heads=4, vocab=152064),
    "14b": Sizes(layers=48, hidden=5120, intermediate=13824, heads=40, key_heads=8, vocab=152064),
    "20b": Sizes(layers=68, hidden=5120, intermediate=13824, heads=40, key_heads=8, vocab=152064),  # 14b, deeper
    "32b": Sizes(layers=64, hidden=5120, intermediate=27648, heads=40, key_heads=8, vocab=152064),
}


class Attention(nn.Module):
    """Over stretches of sequences that a mesh cuts; without one over whole sequences."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh | None, balanced: bool) -> None:
        super().__init__()
        self.sizes, self.mesh, self.balanced = sizes, mesh, balanced
        width = sizes.hidden // sizes.heads
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.key_heads) * width)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads, key_heads = self.sizes.heads, self.sizes.key_heads
        split = self.qkv(x).unflatten(-1, (heads + 2 * key_heads, -1)).transpose(1, 2)
        q, k, v = split.split([heads, key_heads, key_heads], dim=1)
        q, k = turned(q, turns), turned(k, turns)
        if self.mesh is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = onefold.sequence_attention(q, k, v, self.mesh, balanced=self.balanced)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, mesh: DeviceMesh | None, balanced: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.mlp = Attention(sizes, mesh, balanced), MLP(sizes)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A stretch of tokens in, as onefold.cut_sequence gives it, and the sum of its losses out."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh | None, tile: int | None, *, balanced: bool = False) -> None:
        super().__init__()
        self.width, self.tile = sizes.hidden // sizes.heads, tile
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes, mesh, balanced) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        return self.loss(self.hidden(input_ids, position_ids), shift_labels, "sum")

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        turns = rotations(positions, self.width).to(x.dtype)
        for block in self.layers:
            x = block(x, turns)
        return self.norm(x)

    def loss(self, hidden: Tensor, targets: Tensor, reduction: Literal["sum", "mean"]) -> Tensor:
        """By tiles of so many tokens, or with logits of all tokens at once."""
        if self.tile is not None:
            return onefold.tiled_cross_entropy(hidden, self.head.weight, targets, tokens=self.tile, reduction=reduction)
        logits = self.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), reduction=reduction)


class CausalDecoder(Decoder):
    """Whole sequences and their next tokens in, and the mean loss out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, None, None)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.loss(self.hidden(tokens, positions), targets, "mean")


def rotations(positions: Tensor, width: int) -> Tensor:
    """Cosines and sines (2, batch, 1, tokens, width / 2)."""
    rates = ROTARY_BASE ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[:, None, :, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def turned(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
