"""torch's own modules, parametrizations, custom functions and compiled blocks at stage 3."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.harness.grids import thinned
from tests.models import (
    DIM,
    Attention,
    Cells,
    EncoderDecoder,
    Listed,
    Positions,
    Recurrent,
    Residual,
    Scaling,
    TransposedConvNet,
)
from tests.parity.stage3.compare import Case, assert_equal, batch, differences

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


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(layer)


CASES: dict[str, Case] = {
    "convolutions": Case(TransposedConvNet, learn_image),
    "convolutions, channels last": Case(lambda: TransposedConvNet(channels_last=True), learn_image),
    "lstm": Case(lambda: Recurrent(nn.LSTM, 2, False), learn_sequence),
    "gru": Case(lambda: Recurrent(nn.GRU, 1, False), learn_sequence),
    "lstms in a list": Case(lambda: Recurrent(nn.LSTM, 1, True), learn_sequence),
    "lstm cell": Case(Cells, learn_sequence),
    "attention": Case(Attention, learn_sequence),
    "transformer encoder": Case(encoder, learn_sequence),
    "transformer": Case(EncoderDecoder, learn_sequence),
    "weight norm": Case(lambda: nn.Sequential(*[parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])),
    "weight norm, old": Case(lambda: nn.Sequential(*[old_weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])),
    "spectral norm": Case(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.Tanh())),
    "custom function": Case(lambda: nn.Sequential(Scaling(False), Scaling(False), nn.Linear(DIM, 2))),
    "custom function by hand": Case(lambda: nn.Sequential(Scaling(True), Scaling(True), nn.Linear(DIM, 2))),
    "a part of a parameter handed out": Case(Positions, learn_sequence),
    "parameter list": Case(Listed, learn_sequence),
}


def of_torch(name: str) -> list[str]:
    return differences(CASES[name])


@pytest.mark.parametrize(("name", "ranks"), thinned(CASES, [2, 3]))
def test_modules_of_torch_train_to_the_same_bits(name: str, ranks: int) -> None:
    assert_equal(ranks, of_torch, name)


def compiled(backend: str) -> list[str]:
    def build() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(DIM, DIM), *[Residual() for _ in range(2)], nn.Linear(DIM, 2))
        for block in model[1:3]:
            block.forward = torch.compile(block.forward, backend=backend)
        return model

    return differences(Case(build))


@pytest.mark.parametrize(  # the last does what the others do, and more
    "backend", ["aot_eager", *(pytest.param(name, marks=pytest.mark.soak) for name in ("eager", "inductor"))]
)
def test_compiled_blocks_train_to_the_same_bits(backend: str) -> None:
    assert_equal(2, compiled, backend)
