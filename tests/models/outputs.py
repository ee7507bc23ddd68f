"""Models that take or return structures: dicts, tuples, dataclasses, parameters, objects that hold themselves."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.buffers import Normed
from tests.models.plain import DIM, Residual, Stack


@dataclass
class Out:
    """An output with a tensor and things that are none."""

    y: Tensor
    note: str = "x"
    nothing: None = None
    more: dict[str, str] = field(default_factory=dict)


class Returning(nn.Module):
    """One structure per kind of output."""

    def __init__(self, kind: str, dim: int = DIM) -> None:
        super().__init__()
        self.kind, self.layer, self.head = kind, nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.alone = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor) -> Any:
        y, z = self.layer(x), self.head(torch.tanh(self.layer(x)))
        if self.kind == "dict":
            return {"a": y, "more": {"b": z, "none": None}, "text": "x"}
        if self.kind == "tuple":
            return y, (z, None, 3)
        if self.kind == "list":
            return [[y], None, z]
        if self.kind == "dataclass":
            return Out(y + z.sum())
        return y, self.alone  # "parameter"


class ReturningBlock(nn.Module):
    """Returns one kind of structure, and leaves a loss in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.block, self.aux = kind, Residual(), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        self.aux, self.y = (self.block.up.weight.square().mean() + y.abs().mean()) / 10, y
        return shaped(self.kind, y)

    def left(self, x: Tensor) -> Tensor:
        assert self(x) is None
        return self.y


class ReturningBlocks(nn.Module):
    """Blocks and root return one kind of structure; the loss also takes what blocks left in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(ReturningBlock(kind) for _ in range(3))
        self.head = nn.Linear(DIM, DIM)
        self.alone = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = opened(layer(x)) if self.kind != "None" else layer.left(x)
        if self.kind == "parameter":
            return self.head(x), self.alone, self.head.weight
        return shaped(self.kind, self.head(x))


def shaped(kind: str, y: Tensor) -> Any:
    kinds = {
        "dict": {"y": y, "none": None}, "tuple": (None, (y, 3)), "dataclass": Out(y, more={"text": "x"}), "None": None,
    }  # fmt: skip
    return kinds.get(kind, y)


def opened(out: Any) -> Tensor:
    """The tensor in what `shaped` made."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict):
        return out["y"]
    return out.y if isinstance(out, Out) else out[1][0]


class ReturningWeight(Stack):
    """Gives one of its parameters away, which stays unsharded until backward is over."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.layers[3].up.weight


class Node:
    """Of a tree whose nodes know their parents, and a logger, which knows all others."""

    def __init__(self, tensor: Tensor, parent: Node | None = None) -> None:
        self.tensor, self.parent, self.children = tensor, parent, list[Node]()
        self.log = logging.getLogger("a.b.c")


class ReturningNode(Stack):
    """Returns an object that holds itself."""

    def forward(self, x: Tensor) -> Any:
        root = Node(super().forward(x))
        root.children.append(Node(root.tensor * 2, root))
        return root


@dataclass(frozen=True)
class Input:
    x: Tensor
    name: str = "x"


class TakingAny(Normed):
    """Takes its tensor in any container, and a list that it writes to."""

    def forward(self, data: Any, log: list[str]) -> Tensor:
        log.append("seen")
        return super().forward(data.x if isinstance(data, Input) else data["x"])


class WithoutAttention(nn.Module):
    """A language model that gives its loss to transformers' Trainer, without masks: where transformers' own models make
    them, the host waits for the device."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x)).float()
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}
