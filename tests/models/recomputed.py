"""Blocks that are awkward to run again in backward: their inputs, their outputs, what they do besides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDE = 32


class ManyInputs(nn.Module):
    """Dropout, a mask, a table that all blocks share, None, a number, a second tensor by keyword."""

    def __init__(self, dim: int = WIDE) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.2)

    def forward(
        self, x: Tensor, pair: tuple[Tensor, None], scale: float = 1.0, *, table: Tensor | None = None
    ) -> Tensor:
        mask, nothing = pair
        assert nothing is None
        y = self.norm(x) * mask
        if table is not None:
            y = y + table
        return x + scale * self.drop(self.down(F.gelu(self.up(y))))


class ManyInputsNet(nn.Module):
    """Blocks that take what blocks in the wild take; with `shared`, the table has a gradient, summed over blocks."""

    def __init__(self, layers: int = 4, dim: int = WIDE, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(ManyInputs(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 5)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.linspace(0, 1, x.shape[-1], device=x.device).expand_as(x).to(x.dtype)
        table = torch.tanh(x * table) if self.shared else table
        mask = (x.detach() > -2).to(x.dtype)
        for block in self.blocks:
            x = block(x, (mask, None), 0.5, table=table)
        return self.head(x)


class Tower(nn.Module):
    """Blocks of one class between two linear layers; `around` puts them in a checkpoint, reentrant or not."""

    def __init__(self, block: type[nn.Module], layers: int = 3, frozen: int = 0, around: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.around = around
        for part in [self.first, *self.blocks[:frozen]] if frozen else []:
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.around is not None:
            return self.last(checkpoint(self.body, x, use_reentrant=self.around))
        return self.last(self.body(x))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.layer(self.norm(x))))


class CheckpointInside(DropoutBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + checkpoint(self.layer, x, use_reentrant=False)


class WritingInput(DropoutBlock):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return super().forward(x)


class Turned(DropoutBlock):
    """Hands its output on with other strides, and as a part of a larger tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)
        return torch.cat([y, y], -1)[..., :WIDE]


class Squaring(DropoutBlock):
    """Uses none of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class RunAgain(DropoutBlock):
    """Calls `on_again` whenever it runs inside backward."""

    on_again: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            self.on_again()
        return super().forward(x)


class Narrowing(nn.Module):
    """Each block hands on half of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(3))
        self.first = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)[: len(x) // 2]
        return x


class Reporting(nn.Module):
    """Adds to a list it is given, as mixtures of experts do with their losses, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        hidden = torch.relu(self.linear(self.norm(x)))
        losses.append(hidden.mean())
        return x + hidden


class ReportingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.blocks = nn.Linear(8, 8), nn.ModuleList(Reporting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, losses)
        assert len(losses) == 3
        return x.square().mean() + sum(losses)
