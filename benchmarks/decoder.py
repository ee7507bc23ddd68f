"""A decoder of Qwen2.5's shapes in plain PyTorch, over sequences that a mesh may cut: grouped queries, rotary
positions, gated MLPs, and a tiled loss."""

from __future__ import annotations

from dataclasses import dataclass

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


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, mesh: DeviceMesh, balanced: bool) -> None:
        super().__init__()
        self.sizes, self.mesh, self.balanced = sizes, mesh, balanced
        width = sizes.hidden // sizes.heads
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.key_heads) * width)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads, key_heads = self.sizes.heads, self.sizes.key_heads
        split = self.qkv(x).unflatten(-1, (heads + 2 * key_heads, -1)).transpose(1, 2)
        q, k, v = split.split([heads, key_heads, key_heads], dim=1)
        mixed = onefold.sequence_attention(turned(q, turns), turned(k, turns), v, self.mesh, balanced=self.balanced)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, mesh: DeviceMesh, balanced: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.mlp = Attention(sizes, mesh, balanced), MLP(sizes)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A stretch of tokens in, as onefold.cut_sequence gives it, and the sum of its losses out."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, tile: int, *, balanced: bool = False) -> None:
        super().__init__()
        self.width, self.tile = sizes.hidden // sizes.heads, tile
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, mesh, balanced) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        turns = rotations(position_ids, self.width).to(x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        return onefold.tiled_cross_entropy(
            self.norm(x), self.head.weight, shift_labels, tokens=self.tile, reduction="sum"
        )


def rotations(positions: Tensor, width: int) -> Tensor:
    """Cosines and sines (2, batch, 1, tokens, width / 2)."""
    rates = ROTARY_BASE ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[:, None, :, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def turned(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
