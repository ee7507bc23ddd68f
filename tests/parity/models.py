"""Small models with every trait that has broken a sharding library, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, SEQ = 50, 24, 6
Loss = Callable[[nn.Module, torch.Generator, int], Tensor]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Loss
    unused: bool = False  # some parameters get no gradient
    steps: int = 3  # to train it for: the first is recorded, the second follows the record


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False, checkpointing: str = "") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


def token_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def vector_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    return model(torch.randn(3, DIM, generator=generator)).square().mean()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def image_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    return model(torch.randn(4, 3, 7, 7, generator=generator)).square().mean()


class Skipping(nn.Module):
    """Which branch runs depends on the rank and the step; one branch never runs, one only later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
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


def skipping_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    getattr(model, "module", model).step = step
    return vector_loss(model, generator, step)


class Twice(nn.Module):
    """One submodule called twice, a parameter used outside its module, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return {"y": self.out(x), "z": F.linear(x, self.shared.weight)}


def dict_loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
    out = model(torch.randn(3, DIM, generator=generator))
    return out["y"].square().mean() + out["z"].abs().mean()


class Odd(nn.Module):
    """Scalars, empty and odd-sized parameters, fewer elements than ranks, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Parameter(torch.linspace(-1, 1, 67))
        self.frozen, self.out = nn.Linear(DIM, 67), nn.Linear(67, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.frozen(x)) * self.odd * self.scale) + self.empty.sum()


MODELS: dict[str, Case] = {
    "gpt": Case(GPT, token_loss),
    "gpt-tied": Case(lambda: GPT(tied=True), token_loss),
    "gpt-checkpoint": Case(lambda: GPT(checkpointing="plain"), token_loss),
    "gpt-reentrant": Case(lambda: GPT(checkpointing="reentrant"), token_loss),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(DIM, 33), nn.Tanh(), nn.Linear(33, 5)), vector_loss),
    "wide": Case(lambda: nn.Sequential(nn.Linear(DIM, 4099), nn.Tanh(), nn.Linear(4099, DIM)), vector_loss),
    "conv": Case(ConvNet, image_loss),
    "channels-last": Case(lambda: ConvNet().to(memory_format=torch.channels_last), image_loss),
    "skipping": Case(Skipping, skipping_loss, unused=True, steps=5),
    "twice": Case(Twice, dict_loss),
    "odd": Case(Odd, vector_loss),
}
