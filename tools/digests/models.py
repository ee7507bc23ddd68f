"""Six small models, each with a trait that makes sharding hard, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, SEQ, BATCH, BLOCKS = 30, 16, 5, 3, 3


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]


class Attention(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / DIM**0.5).softmax(-1)
        x = x + self.out(scores @ v)
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Tokens(nn.Module):
    """Embedding, blocks and a head; the head may be the embedding."""

    def __init__(self, block: type[nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.blocks = nn.Sequential(*(Convolution() for _ in range(BLOCKS)))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to one of three experts; a fourth is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x)[..., :3].softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out = out.masked_scatter(mine[..., None], torch.tanh(expert(x[mine])).to(x.dtype))
        return x + out * share[..., None]


class PartlyFrozen(Tokens):
    """The embedding, one whole block and a matrix in another are not trained."""

    def __init__(self) -> None:
        super().__init__(Dense)
        self.tokens.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class Skipping(Tokens):
    """Stochastic depth: which blocks run differs between ranks and steps."""

    def __init__(self) -> None:
        super().__init__(Dense)
        self.kept = (True,) * BLOCKS

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for kept, block in zip(self.kept, self.blocks):
            if kept or not self.training:
                x = block(x)
        return self.head(self.norm(x))


class Outside(Tokens):
    """The embedding's matrix and a block's vector are also used outside their modules."""

    def __init__(self) -> None:
        super().__init__(Dense)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + F.linear(x * self.blocks[0].scale, self.tokens.weight)


def token_loss(model: nn.Module, batch: torch.Generator) -> Tensor:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=batch)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def image_loss(model: nn.Module, batch: torch.Generator) -> Tensor:
    return model(torch.randn(BATCH, 3, 6, 6, generator=batch)).float().square().mean()


def skipping_loss(model: nn.Module, batch: torch.Generator) -> Tensor:
    model.kept = tuple(torch.rand(BLOCKS, generator=batch).gt(0.4).tolist())
    return token_loss(model, batch)


MODELS = {
    "gpt-tied": Model(lambda: Tokens(Attention, tied=True), token_loss),
    "conv-norm": Model(ConvNet, image_loss),
    "moe": Model(lambda: Tokens(Experts), token_loss),
    "frozen": Model(PartlyFrozen, token_loss),
    "skipping": Model(Skipping, skipping_loss),
    "outside": Model(Outside, token_loss),
}
