"""Models of which not every part runs: by step, by rank, or by what the tokens hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.plain import DIM, Gained, Layers, Stack

Pick = Callable[[int, int], Iterable[int]]  # step, rank -> blocks to run


class Skipping(nn.Module):
    """Which branch runs depends on the rank and the step; one branch never runs, one only later."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.branches = nn.ModuleList(nn.Linear(dim, dim) for _ in range(5))
        self.never = nn.Parameter(torch.ones(7))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        picked = {(dist.get_rank() + self.step) % 3}
        if self.step >= 3:
            picked.add(4)
        for index in sorted(picked):
            x = x + torch.tanh(self.branches[index](x))
        return x


class Chain(Stack):
    """Which blocks run, and in which order, is chosen anew for each step and rank."""

    def __init__(
        self, pick: Pick, layers: nn.ModuleList, head: nn.Module | None = None, first: nn.Module | None = None
    ) -> None:
        super().__init__(layers, head, first)
        self.pick, self.step = pick, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for index in self.pick(self.step, dist.get_rank()):
            x = self.layers[index](x)
        return x if self.head is None else self.head(x)


class EndsFirst(nn.Module):
    """The first and the last layer are registered before the blocks, so that small parameters of both share a unit,
    which is used first and last."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width // 4, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)
        )

    def forward(self, x: Tensor, skip: int) -> Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != skip:
                h = h + block(h)
        return self.last(h)


class SkippingOne(Gained):
    """Each rank skips the block of its own number; nobody uses the root's parameter."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != dist.get_rank():
                x = layer(x)
        return self.head(x)


class Warming(Gained):
    """While `frozen_now`, all blocks run without a graph; then each rank skips the block of its own number."""

    frozen_now = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen_now):
            for index, layer in enumerate(self.layers):
                if index != dist.get_rank() or self.frozen_now:
                    x = layer(x)
        return self.head(x)


class Dropping(Layers):
    """Which layers run is given with the input."""

    def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
        for layer, keep in zip(self.layers, kept, strict=True):
            x = x + torch.tanh(layer(x)) if keep else x
        return x


class Branches(nn.Module):
    """Which branches run is given with the input."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.branches = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, dim) * (i + 1)) for i in range(4))

    def forward(self, x: Tensor, picked: list[int]) -> Tensor:
        x = self.first(x)
        for index in picked:
            x = x + torch.tanh(x * self.branches[index])
        return x


class Passing(nn.Module):
    """Without `use`, the output depends on no parameter at all."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.layer(x) if use else x * 2


class Pair(nn.Module):
    """Two layers, the second of which may be skipped; in one unit, a shard ends inside it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


class NowAndThen(nn.Module):
    """A layer with an adapter that is used while `on`."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.layer, self.adapter, self.on = nn.Linear(dim, dim), nn.Linear(dim, dim), False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.adapter(x) if self.on else x)


class Expert(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Tokens go to the expert that scores highest; an expert without tokens is not called."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 5), nn.ModuleList(Expert(dim) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, index, None])
        return x + out


class Routed(nn.Module):
    """Which rows go through the expert depends on their values, and so do the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.gate(x).squeeze(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.expert(x[chosen]) * self.gate(x[chosen]))
