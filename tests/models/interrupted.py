"""Models that fail in backward, keep the host busy, or tell when they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.plain import Layers


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


class Mined(nn.Module):
    """While `armed`, backward fails between two parts."""

    def __init__(self, below: nn.Module, above: nn.Module) -> None:
        super().__init__()
        self.below, self.above, self.armed = below, above, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        return self.above(FailingBackward.apply(x) if self.armed else x)


class MinedLayers(Layers):
    """While `armed`, backward fails before it comes to the first layer."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = FailingBackward.apply(x) if self.armed and index == 0 else x
        return x


class Watched(nn.Module):
    """A linear layer that calls the test when its forward, or its backward, begins."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.on_forward: Callable[[], None] = lambda: None
        self.on_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward()
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.on_backward())
        return out


class Thinker(nn.Sequential):
    """A model whose host has something else to do in every forward."""

    THOUGHT_S = 0.25

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.THOUGHT_S)
        return super().forward(x)
