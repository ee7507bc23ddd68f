"""Models with state besides parameters: buffers, statistics, extra state; and those with every trait at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.plain import DIM, blocks


class Normed(nn.Module):
    """A linear layer behind which batch norm keeps statistics."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class PositionTable(nn.Module):
    """Embeddings plus an fp32 table, blocks, and a head; float timesteps scale the table, and dtypes are recorded."""

    def __init__(self, vocabulary: int, length: int, dim: int = DIM) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(vocabulary, dim), blocks(2, dim), nn.Linear(dim, 4)
        self.register_buffer("table", torch.linspace(-1, 1, length * dim).view(length, dim))
        self.seen: list[tuple[torch.dtype, float]] = []

    def forward(self, x: Tensor, scale: Tensor, *, time: Tensor) -> Tensor:
        self.seen += [(scale.dtype, scale.item()), (time.dtype, time.item())]
        h = self.tokens(x) * scale + self.table * (time / 1000).float()
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class BufferDtypes(Normed):
    """Statistics in fp32 and int64, and buffers of two more dtypes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("ones16", torch.ones(3, dtype=torch.float16))
        self.register_buffer("flags", torch.tensor([True, False]))


class OneBuffer(nn.Module):
    """A linear layer beside a buffer, which no reset_parameters fills."""

    def __init__(self, width: int, name: str, buffer: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer(name, buffer, persistent)


class Counting(nn.Module):
    """Blocks behind a norm with statistics and a buffer that counts forwards; fails in the second block if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers, self.head = nn.BatchNorm1d(DIM), blocks(3), nn.Linear(DIM, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.norm(x)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.fail and index == 1:
                raise ValueError("as planned")
        return self.head(x)


class ExtraState(nn.Linear):
    """A linear layer with extra state."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class ExtraStateAlone(nn.Module):
    """Extra state and nothing else."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


class TwoNames(nn.Module):
    """A module under two names, and one with a state of its own."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(dim)
        self.b, self.counting, self.head = self.a, ExtraStateAlone(), nn.Linear(dim, 2)


# -- every trait at once -----------------------------------------------------------------------------------------------


class EveryTrait(nn.Module):
    """Tied, frozen, unused and seldom used parameters, dropout, batch norm, channels_last, a scalar, an empty one."""

    DIM = 24

    def __init__(self, vocab: int) -> None:
        super().__init__()
        dim = self.DIM
        self.tokens, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.conv = nn.Conv2d(3, 8, 2).to(memory_format=torch.channels_last)
        self.fixed = nn.Linear(dim, dim).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.BatchNorm1d(dim)
        self.never, self.empty = nn.Parameter(torch.ones(7)), nn.Parameter(torch.zeros(0, 3))
        self.scale, self.seldom = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(67))
        self.late = False
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.fixed(self.tokens(tokens))
        x = x + self.conv(x.view(-1, 3, 4, 2)).sum((1, 2, 3)).view(*tokens.shape, 1)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2)
        x = self.norm(x.flatten(0, 1)).view_as(x) * self.scale
        if self.late:
            x = x * (1 + self.seldom.square().mean())
        return self.head(x)


class TiedAndStrided(nn.Module):
    """Tied weights, a buffer, a frozen parameter, and strides that safetensors does not have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 12)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(12)
        self.fixed = nn.Parameter(torch.randn(7), requires_grad=False)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embed.weight


class Assorted(nn.Module):
    """Trained, frozen, and with buffers of several types, for ranks that disagree about one of them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, 3).requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t(), persistent=False)
