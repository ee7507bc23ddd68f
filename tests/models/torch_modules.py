"""torch's own modules, custom functions and lists of parameters, as models use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.plain import DIM


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class TransposedConvNet(nn.Module):
    """A transposed convolution, group norm and a bilinear layer besides."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3))
        self.norm, self.head = nn.GroupNorm(1, 5), nn.Bilinear(5, 5, 4)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x)).mean((2, 3))
        return self.head(x, x)


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.LSTM] | type[nn.GRU], layers: int, in_list: bool) -> None:
        super().__init__()
        cells = [cls(DIM, DIM, layers, batch_first=True) for _ in range(2 if in_list else 1)]
        self.cells, self.head = nn.ModuleList(cells), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)[0]
        return self.head(x)


class Cells(nn.Module):
    """One cell called for every element of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(DIM, DIM), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        return self.head(state[0])


class Attention(nn.Module):
    """Alone at the root: its output projection is used without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(DIM, 2, batch_first=True), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(DIM, 2, 2, 2, 2 * DIM, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x)


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / 4) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(DIM)), "b": nn.Parameter(torch.randn(DIM))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(F.linear(x, weight, self.named["a"]))
        return x * self.named["b"]


class Scale(torch.autograd.Function):
    """Saves the weight as torch wants it, or keeps it by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_hand: bool) -> Tensor:
        ctx.by_hand, ctx.x = by_hand, x.detach()
        if by_hand:
            ctx.weight = weight
        else:
            ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.weight if ctx.by_hand else ctx.saved_tensors[0]
        return grad @ weight.t(), ctx.x.t() @ grad, None


class Scaling(nn.Module):
    """A custom function that uses a weight in forward and in backward."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.weight = by_hand, nn.Parameter(torch.randn(DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scale.apply(x, self.weight, self.by_hand))
