"""Two towers and a temperature: a model whose users call other methods than forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import DIM, Stack, blocks


class Clip(nn.Module):
    """Bare parameters of the root are used in methods of their own."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.visual, self.text = Stack(blocks(2, dim)), Stack(blocks(2, dim))
        self.positions = nn.Parameter(torch.randn(dim) * 0.1)
        self.projection = nn.Parameter(torch.randn(dim, dim) * 0.1)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def encode_image(self, x: Tensor) -> Tensor:
        return self.visual(x) @ self.projection

    def encode_text(self, x: Tensor) -> Tensor:
        return self.text(x + self.positions)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.logit_scale.exp() * self.encode_image(image) @ self.encode_text(text).t()
