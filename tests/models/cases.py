"""Small models with every trait that has broken a sharding library, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.device import device
from tests.models.branches import Skipping
from tests.models.experts import StackedExperts
from tests.models.torch_modules import ConvNet
from tests.models.traits import Odd, Twice
from tests.models.transformers import GPT, GPT_DIM, GPT_VOCAB

GPT_SEQ = 6
Loss = Callable[[nn.Module, torch.Generator, int], Tensor]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Loss
    unused: bool = False  # some parameters get no gradient
    steps: int = 3  # to train it for: the first is recorded, the second follows the record


def token_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    tokens = torch.randint(0, GPT_VOCAB, (2, GPT_SEQ + 1), generator=generator).to(device())
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def vector_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    return model(torch.randn(3, GPT_DIM, generator=generator).to(device())).square().mean()


def image_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    return model(torch.randn(4, 3, 7, 7, generator=generator).to(device())).square().mean()


def skipping_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    getattr(model, "module", model).step = step
    return vector_loss(model, generator, step)


def dict_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    out = model(torch.randn(3, GPT_DIM, generator=generator).to(device()))
    return out["y"].square().mean() + out["z"].abs().mean()


def mlp_case(width: int, outputs: int) -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(GPT_DIM, width), nn.Tanh(), nn.Linear(width, outputs)), vector_loss)


MODELS: dict[str, Case] = {
    "gpt": Case(GPT, token_loss),
    "gpt-tied": Case(lambda: GPT(tied=True), token_loss),
    "gpt-checkpoint": Case(lambda: GPT(checkpointing="plain"), token_loss),
    "gpt-reentrant": Case(lambda: GPT(checkpointing="reentrant"), token_loss),
    "experts": Case(StackedExperts, token_loss),
    "mlp": mlp_case(33, 5),
    "wide": mlp_case(4099, GPT_DIM),
    "conv": Case(ConvNet, image_loss),
    "channels-last": Case(lambda: ConvNet().to(memory_format=torch.channels_last), image_loss),
    "skipping": Case(lambda: Skipping(GPT_DIM), skipping_loss, unused=True, steps=5),
    "twice": Case(lambda: Twice(GPT_DIM), dict_loss),
    "odd": Case(lambda: Odd(GPT_DIM), vector_loss),
}
