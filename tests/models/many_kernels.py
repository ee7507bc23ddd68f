"""A block of many small kernels whose backward keeps a device busy for longer than the host needs to launch it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KERNELS, PRODUCTS, SIDE = 40, 10, 4096  # ten such products take a GPU of today some milliseconds


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        work = torch.zeros(SIDE, SIDE, dtype=grad.dtype, device=grad.device)
        for _ in range(PRODUCTS):
            work = work @ work
        return grad + work[0, 0]


class ManyKernels(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = SlowBackward.apply(self.linear(x))
        for _ in range(KERNELS):
            y = y * 1.001
        return x + y
