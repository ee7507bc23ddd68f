"""Language models: attention with dropout, or residual blocks between an embedding and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.plain import DIM, blocks

GPT_VOCAB, GPT_DIM = 50, 24


class AttentionBlock(nn.Module):
    def __init__(self, dim: int = GPT_DIM) -> None:
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
        self.tokens = nn.Embedding(GPT_VOCAB, GPT_DIM)
        self.layers = nn.ModuleList(AttentionBlock() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(GPT_DIM), nn.Linear(GPT_DIM, GPT_VOCAB, bias=False)
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


class Language(nn.Module):
    """Embedding, blocks, head; `trait` says which parameter is used outside its own module."""

    def __init__(self, vocab: int, layers: int = 3, trait: str = "plain") -> None:
        super().__init__()
        self.trait = trait
        self.tokens, self.layers, self.norm = nn.Embedding(vocab, DIM), blocks(layers), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        if trait == "tied":
            self.head.weight = self.tokens.weight
        if trait == "tied to a block":
            self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, tokens: Tensor) -> Tensor:
        early = self.head.weight.t() if self.trait == "head taken at the start" else None
        first = self.layers[0].up.weight if self.trait == "block's weight taken at the start" else None
        x = self.tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.trait == "block's weight taken behind it":
                first = self.layers[0].up.weight
            if index == 0 and self.trait == "view of a block's weight taken behind it":
                first = self.layers[0].up.weight.t().t()
        x = self.norm(x)
        if first is not None:
            x = x + torch.tanh(F.linear(x, first)[..., :DIM])
        if self.trait == "embedding used as head":
            return F.linear(x, self.tokens.weight) + self.head(x)
        return self.head(x) if early is None else x @ early


class Resettable(nn.Module):
    """A language model whose every module has reset_parameters, which fills buffers too; `tied` shares its head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(24, 24), "n": nn.LayerNorm(24)}) for _ in range(3))
        self.batch, self.head = nn.BatchNorm1d(24), nn.Linear(24, 50)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer["n"](layer["a"](x))
        return self.head(self.batch(x))


class Tables(nn.Module):
    """Mostly embeddings, whose values backward does without."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.tables, self.head = nn.ModuleList(nn.Embedding(64, width) for _ in range(7)), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, y = (x.float().abs() * 20).long().clamp(max=63), torch.zeros(len(x), self.head.in_features)
        for table in self.tables:
            y = torch.tanh(y + table(rows).sum(1))
        return self.head(y)
