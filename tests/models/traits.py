"""Models with one awkward trait of their parameters each: tied, frozen, of odd sizes, of several dtypes, written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.plain import DIM, Residual, Stack, blocks

# -- tied and reused ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two linear layers with one weight, of which only one has a bias."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(dim, 7, bias=False), nn.Linear(7, dim)
        self.again = nn.Linear(dim, 7)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.decode(torch.tanh(self.encode(x))))) + self.encode(x)


class Repeated(nn.Module):
    """A submodule called twice, its weight used a third time by hand."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.shared = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(x))) + x @ self.shared.weight


class Twice(nn.Module):
    """One submodule called twice, a parameter used outside its module, outputs in a dict."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shared, self.out = nn.Linear(dim, dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return {"y": self.out(x), "z": F.linear(x, self.shared.weight)}


class Detached(nn.Module):
    """A weight used twice, once outside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid = nn.Linear(32, 32), nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        self.w = nn.Parameter(torch.randn(32, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mid(self.first(x) @ self.w.detach())) @ self.w


# -- frozen ------------------------------------------------------------------------------------------------------------


class FrozenMiddle(nn.Module):
    """A frozen layer between two that train."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (
            nn.Linear(inputs, width),
            nn.Linear(width, width),
            nn.Linear(width, outputs),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class Adapted(nn.Module):
    """LoRA: a frozen weight, a trained pair of thin ones, all parameters of one module."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / 4, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, dim)), nn.Parameter(torch.zeros(dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + x @ self.a.t() @ self.b.t()


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.query(x)) * self.value(x)


class Adapter(nn.Module):
    """LoRA of modules: a frozen layer beside two thin ones."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2), nn.Linear(2, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


# -- sizes and dtypes --------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift)


class Sizes(nn.Module):
    """Nothing, one number, and more than a unit may hold."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.huge = nn.Parameter(torch.linspace(-1, 1, 3001 * dim).view(dim, 3001))
        self.tail = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.huge) * self.scale + self.empty.sum() + self.tail.sum()


class Odd(nn.Module):
    """Scalars, empty and odd-sized parameters, fewer elements than ranks, a frozen layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Parameter(torch.linspace(-1, 1, 67))
        self.frozen, self.out = nn.Linear(dim, 67), nn.Linear(67, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.frozen(x)) * self.odd * self.scale) + self.empty.sum()


class AnySize(nn.Module):
    """Sizes that the test chooses; perhaps a frozen layer, perhaps buffers."""

    def __init__(self, width: int, inner: int, depth: int, frozen: bool, buffers: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Residual(width, inner, F.gelu) for _ in range(depth))
        self.fixed = nn.Linear(width, width).requires_grad_(not frozen)
        self.norm = nn.BatchNorm1d(width) if buffers else nn.Identity()
        self.last = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(self.fixed(x)))


class Weighed(nn.Module):
    """A weighted sum of all parameters: their gradients are the weights, exactly and on every device."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, weights: list[Tensor]) -> Tensor:
        return sum((part * weight.to(part.dtype)).sum(dtype=torch.float32) for part, weight in zip(self.parts, weights))


class Point(nn.Module):
    """One vector near 1 that must move by 0.1, in small steps."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.full((64,), 1.0))

    def forward(self) -> Tensor:
        return (self.point.float() - 1.1).square().sum()


class TwoWidths(nn.Module):
    """Two dtypes: elements of 4 and of 8 bytes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(dim, 33), nn.Linear(33, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).double())


class BetweenTwoNumbers(nn.Module):
    """A bf16 parameter, and an fp32 one that lies half way between two bf16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.full((64,), 1.00390625))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * self.b * x).sum()


class ManyDtypes(nn.Module):
    """A double parameter of its own, integers and complex numbers that nobody trains, buffers, and a region of fp32."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, 4)
        self.exact = nn.Parameter(torch.linspace(0, 1, 4, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(dim), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(dim, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("scale", torch.full((dim,), 0.5))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        self.seen = [x.dtype, shift.dtype, self.scale.dtype, self.table.dtype, self.waves.dtype]
        x = self.norm(torch.tanh(self.first(x + shift)))
        with torch.autocast("cpu", enabled=False):
            wide = x.float() * self.scale * self.waves.abs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.last(wide)
        return {"y": y[:, self.table[:4] % 4].double() * self.exact}


# -- strides, writes, views --------------------------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """A convolution whose weight lies in another order, a layer that may be skipped, gaps between parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.odd, self.skipped, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.conv(x).mean((2, 3)))
        return self.last(x if self.skip else self.skipped(x)).float().pow(2).sum()


class Clamping(Stack):
    """Writes to a block's weight in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].up.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class FillingChild(nn.Module):
    """Its reset_parameters fills what belongs to its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.own = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.own)
        nn.init.zeros_(self.child.weight)


class Box:
    """An object of a kind that torch's tree functions do not know."""

    def __init__(self, part: Tensor) -> None:
        self.part = part


class Table(nn.Module):
    """Hands out a part of its parameter, as learnt position embeddings do."""

    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.table, self.boxed = nn.Parameter(torch.randn(9, DIM)), boxed

    def forward(self, length: int) -> Tensor | Box:
        part = self.table[:length]
        return Box(part) if self.boxed else part


class Positions(nn.Module):
    """Takes a part of a table before all blocks and adds it behind them; `boxed`, torch does not see it meanwhile."""

    def __init__(self, boxed: bool = False) -> None:
        super().__init__()
        self.positions, self.first, self.layers = Table(boxed), nn.Linear(DIM, DIM), blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        taken = self.positions(x.shape[-2])
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x + (taken.part if isinstance(taken, Box) else taken)
