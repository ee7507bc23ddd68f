"""Modules may return anything, parameters too, and leave losses in attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.grids import thinned
from tests.parity.stage3.compare import DIM, Block, Case, assert_equal, batch, differences


@dataclass
class Out:
    y: Tensor
    more: dict[str, Any]


class Returning(nn.Module):
    """Blocks and root return one kind of structure; the loss also takes what blocks left in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers, self.head = kind, nn.ModuleList(Inner(kind) for _ in range(3)), nn.Linear(DIM, DIM)
        self.alone = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = opened(layer(x)) if self.kind != "None" else layer.left(x)
        if self.kind == "parameter":
            return self.head(x), self.alone, self.head.weight
        return shaped(self.kind, self.head(x))


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.block, self.aux = kind, Block(), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        self.aux, self.y = (self.block.up.weight.square().mean() + y.abs().mean()) / 10, y
        return shaped(self.kind, y)

    def left(self, x: Tensor) -> Tensor:
        assert self(x) is None
        return self.y


def shaped(kind: str, y: Tensor) -> Any:
    kinds = {"dict": {"y": y, "none": None}, "tuple": (None, (y, 3)), "dataclass": Out(y, {"text": "x"}), "None": None}
    return kinds.get(kind, y)


def opened(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict):
        return out["y"]
    return out.y if isinstance(out, Out) else out[1][0]


def loss_with_aux(model: nn.Module, step: int) -> Tensor:
    out = model(batch(step))
    loss = sum(layer.aux for layer in model.layers)
    if model.kind == "parameter":
        loss = loss + out[0].square().mean() + (out[1] * out[0]).square().mean() + (out[0] @ out[2]).square().mean()
    elif out is not None:
        loss = loss + opened(out).square().mean()
    loss.backward()
    return loss


def returning(kind: str) -> list[str]:
    return differences(Case(lambda: Returning(kind), loss_with_aux))


@pytest.mark.parametrize(
    ("kind", "ranks"), thinned(["tensor", "dict", "tuple", "dataclass", "None", "parameter"], [2, 3])
)
def test_modules_may_return_anything_and_leave_losses_in_attributes(kind: str, ranks: int) -> None:
    assert_equal(ranks, returning, kind)
