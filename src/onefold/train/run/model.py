"""A GPT-2-like language model in plain PyTorch. It knows nothing of ZeRO, and of a mesh that it cuts its sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onefold.comm.mesh import Mesh
from onefold.cost.shapes import Shape
from onefold.parallel.cut_sequence import note_stretches, place_along
from onefold.parallel.sequence_attention import sequence_attention
from onefold.parallel.stretches import Span, pieces


class Last(nn.Linear):
    """Ends a residual branch: filled with smaller values the more branches there are."""


class Attention(nn.Module):
    def __init__(self, shape: Shape, mesh: Mesh | None) -> None:
        super().__init__()
        self.mesh, self.balanced = mesh, balances(shape, mesh)
        self.head_dim = shape.hidden // shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)  # head by head: any run of heads is a run of rows
        self.out = Last(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # as many as are here
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        if self.mesh is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = sequence_attention(q, k, v, self.mesh, balanced=self.balanced)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = Last(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape: Shape, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.hidden), Attention(shape, mesh)
        self.norm2, self.mlp = nn.LayerNorm(shape.hidden), MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, and with targets the mean cross-entropy out; without, the logits. Where `mesh` cuts sequences, tokens
    and targets are those of this rank's stretch, and so is the mean.

    >>> model = GPT(Shape(layers=2, hidden=32, heads=2, seq=16, vocab=64))
    >>> tokens = torch.zeros(1, 16, dtype=torch.long)
    >>> model(tokens, tokens).shape
    torch.Size([])
    """

    def __init__(self, shape: Shape, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.shape, self.mesh, self.place, self.balanced = shape, mesh, place_along(mesh), balances(shape, mesh)
        self.wte = nn.Embedding(shape.vocab, shape.hidden)
        self.wpe = nn.Embedding(shape.positions or shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, mesh) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.loss: nn.Module = nn.CrossEntropyLoss()

    def stretch(self, whole: Tensor) -> Tensor:
        """This rank's tokens of whole sequences (batch, tokens)."""
        note_stretches(self.mesh, balanced=self.balanced)
        return torch.cat([whole[:, slice(*piece)] for piece in self._pieces(whole.shape[1] // self.place[1])], dim=1)

    def _pieces(self, tokens: int) -> tuple[Span, ...]:
        return pieces(*self.place, tokens, balanced=self.balanced)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        at = [torch.arange(*piece, device=tokens.device) for piece in self._pieces(tokens.shape[1])]
        x = self.wte(tokens) + self.wpe(torch.cat(at))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)  # tied to the token embedding
        if targets is None:
            return logits
        return self.loss(logits.flatten(0, 1).float(), targets.flatten())


def balances(shape: Shape, mesh: Mesh | None) -> bool:
    """Whether ranks have balanced stretches of the sequences: where attention is by the ring."""
    ranks, names = place_along(mesh)[1], mesh.mesh_dim_names or () if mesh is not None else ()
    tp = mesh.size(names.index("tp")) if mesh is not None and "tp" in names else 1
    return shape.heads // tp % ranks != 0 and shape.seq % (2 * ranks) == 0


def initialise(module: nn.Module, layers: int) -> None:
    """One module's own parameters as GPT-2's: normal, deviation 0.02, less by √(2 × layers) at the ends of branches."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if isinstance(module, Last) else 0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
