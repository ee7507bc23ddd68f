"""Models with nothing odd about them: linear layers, residual blocks, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

DIM = 16  # of a model that is not told otherwise


class Residual(nn.Module):
    """A norm and two linear layers, added to the input: the block that most tests stack."""

    def __init__(
        self, dim: int = DIM, inner: int | None = None, activation: Callable[[Tensor], Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        inner = 2 * dim if inner is None else inner
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def blocks(count: int, dim: int = DIM) -> nn.ModuleList:
    return nn.ModuleList(Residual(dim) for _ in range(count))


class Stack(nn.Module):
    """Blocks one after the other, perhaps with a layer before them and a head behind them.

    The caller builds the parts, in the order in which they are to take random numbers.
    """

    def __init__(self, layers: nn.ModuleList, head: nn.Module | None = None, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.layers, self.head = first, layers, head

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Gained(nn.Module):
    """A parameter of the root, then blocks and a head."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.gain, self.layers, self.head = nn.Parameter(torch.ones(dim)), blocks(3, dim), nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Outer(nn.Module):
    """A model inside another, which a test may run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Gained(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class Layers(nn.Module):
    """Equal linear layers with tanh; `residual` adds each to its input, `backward` runs the last one first."""

    def __init__(
        self, width: int, depth: int, *, bias: bool = True, residual: bool = False, backward: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))
        self.residual, self.backward = residual, backward

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.backward else self.layers:
            y = torch.tanh(layer(x))
            x = x + y if self.residual else y
        return x


class Repeating(nn.Module):
    """One matrix, used so often that computing outlasts any transfer of it."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(width, width, bias=False), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class NamedPair(nn.Module):
    """Two linear layers by names the test chooses; with `more`, a parameter and a buffer besides."""

    def __init__(self, first: str = "up", last: str = "down", more: bool = False) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(6, 9))
        self.add_module(last, nn.Linear(9, 6))
        if more:
            self.gate = nn.Parameter(torch.ones(6))
            self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x * self.gate if hasattr(self, "gate") else x


class PipelinePart(nn.Module):
    """Some of `depth` blocks, by the names they have in the whole model and with its initial parameters."""

    def __init__(self, first: int, last: int, *, depth: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for index in range(depth):  # all are built, so that each has the parameters it has in the whole model
            layer = Residual(dim, activation=torch.relu)
            if first <= index < last:
                self.layers[str(index)] = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class MeanSquare(nn.Module):
    """A model that returns its loss, as the one the README leaves to its reader does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch).square().mean()


class SmallBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Interleaved(nn.Module):
    """Between blocks runs a layer that all share, so no block follows another at once."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock(width) for _ in range(count))
        self.between, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(self.between(block(x)))
        return self.head(x)
