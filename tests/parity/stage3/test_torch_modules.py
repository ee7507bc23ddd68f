"""torch's own modules, parametrizations, custom functions and compiled blocks at stage 3."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.harness.grids import thinned
from tests.parity.stage3.compare import DIM, Block, Case, assert_equal, batch, blocks, differences

SEQ = 5


def learn_image(model: nn.Module, step: int) -> Tensor:
    loss = model(batch(step, 4, 3, 7, 7)).square().mean()
    loss.backward()
    return loss


def learn_sequence(model: nn.Module, step: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        seen = model(batch(step, 2, SEQ, DIM, micro=1)).sum()
    model.train()
    loss = model(batch(step, 2, SEQ, DIM)).square().mean()
    loss.backward()
    return loss + seen


class ConvNet(nn.Module):
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
    def __init__(self, cls: Any, layers: int, in_list: bool) -> None:
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


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(layer)


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
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.weight = by_hand, nn.Parameter(torch.randn(DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scale.apply(x, self.weight, self.by_hand))


class Fetched(nn.Module):
    """A module that hands out a part of its parameter, as learnt position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, DIM))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.first, self.layers = Fetched(), nn.Linear(DIM, DIM), blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[1])
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x + positions


CASES: dict[str, Case] = {
    "convolutions": Case(ConvNet, learn_image),
    "convolutions, channels last": Case(lambda: ConvNet(True), learn_image),
    "lstm": Case(lambda: Recurrent(nn.LSTM, 2, False), learn_sequence),
    "gru": Case(lambda: Recurrent(nn.GRU, 1, False), learn_sequence),
    "lstms in a list": Case(lambda: Recurrent(nn.LSTM, 1, True), learn_sequence),
    "lstm cell": Case(Cells, learn_sequence),
    "attention": Case(Attention, learn_sequence),
    "transformer encoder": Case(encoder, learn_sequence),
    "transformer": Case(lambda: Both(), learn_sequence),
    "weight norm": Case(lambda: nn.Sequential(*[parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])),
    "weight norm, old": Case(lambda: nn.Sequential(*[old_weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])),
    "spectral norm": Case(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.Tanh())),
    "custom function": Case(lambda: nn.Sequential(Scaling(False), Scaling(False), nn.Linear(DIM, 2))),
    "custom function by hand": Case(lambda: nn.Sequential(Scaling(True), Scaling(True), nn.Linear(DIM, 2))),
    "a part of a parameter handed out": Case(Positions, learn_sequence),
    "parameter list": Case(lambda: Listed(), learn_sequence),
}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(DIM, 2, 2, 2, 2 * DIM, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / 4) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(DIM)), "b": nn.Parameter(torch.randn(DIM))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(F.linear(x, weight, self.named["a"]))
        return x * self.named["b"]


def of_torch(name: str) -> list[str]:
    return differences(CASES[name])


@pytest.mark.parametrize(("name", "ranks"), thinned(CASES, [2, 3]))
def test_modules_of_torch_train_to_the_same_bits(name: str, ranks: int) -> None:
    assert_equal(ranks, of_torch, name)


def compiled(backend: str) -> list[str]:
    def build() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(DIM, DIM), *[Block() for _ in range(2)], nn.Linear(DIM, 2))
        for block in model[1:3]:
            block.forward = torch.compile(block.forward, backend=backend)
        return model

    return differences(Case(build))


@pytest.mark.parametrize(  # the last does what the others do, and more
    "backend", ["aot_eager", *(pytest.param(name, marks=pytest.mark.soak) for name in ("eager", "inductor"))]
)
def test_compiled_blocks_train_to_the_same_bits(backend: str) -> None:
    assert_equal(2, compiled, backend)
