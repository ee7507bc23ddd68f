"""A model whose inputs are in containers, beside one that it does not use."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.models.plain import Residual


class NestedInputs(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))

    def forward(self, x: Tensor | None = None, *, batch: Any = None, lengths: Tensor | None = None) -> Tensor:
        return self.blocks(x if batch is None else batch["images"]["x"][0])  # type: ignore[no-any-return]
