"""The GPT cut into parts for a pipeline: each rank builds the blocks of its own part, under the names of the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onefold.cost.shapes import Shape
from onefold.errors import ConfigError
from onefold.train.run.model import Block


class Part(nn.Module):
    """Part `index` of `of`: the first takes tokens, the last gives logits, those between pass hidden states on.

    The embedding is tied to the head, so the first and the last part both hold `wte`.

    >>> part = Part(Shape(layers=4, hidden=32, heads=2, seq=16, vocab=64), index=1, of=2)
    >>> sorted(part.blocks)
    ['2', '3']
    """

    def __init__(self, shape: Shape, index: int, of: int) -> None:
        super().__init__()
        if not 0 <= index < of <= shape.layers:
            raise ConfigError(f"part {index} of {of} of {shape.layers} blocks cannot be; a part holds a block at least")
        self.first, self.last = index == 0, index == of - 1
        if self.first or self.last:
            self.wte = nn.Embedding(shape.vocab, shape.hidden)
        if self.first:
            self.wpe = nn.Embedding(shape.seq, shape.hidden)
        mine = range(shape.layers * index // of, shape.layers * (index + 1) // of)
        self.blocks = nn.ModuleDict({str(number): Block(shape) for number in mine})
        if self.last:
            self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight) if self.last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """What the whole model returns."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
