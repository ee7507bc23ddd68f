"""Ulysses: before attention ranks trade tokens for heads, so that each has some heads of the whole sequence; after it
they trade back. Each way is one all-to-all in forward, and one in backward.

A rank is sent the key and value heads that its query heads need, and no others. Where several ranks need the same one,
each has it, and their gradients are added up, in rank order, where the tokens came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.parallel.exact_attention import wide

PURPOSE = "sequence"  # of the messages of attention, in traffic()


class HeadSplit(NamedTuple):
    """How heads are divided among ranks: equal runs of the query heads."""

    heads: int
    key_heads: int
    ranks: int

    @property
    def each(self) -> int:
        return self.heads // self.ranks

    def queries(self, rank: int) -> slice:
        return slice(rank * self.each, (rank + 1) * self.each)

    def keys(self, rank: int) -> slice:
        """The key heads that a rank's query heads need."""
        group = self.heads // self.key_heads
        return slice(rank * self.each // group, ((rank + 1) * self.each - 1) // group + 1)

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of a rank, its key head among those the rank has; None if they are equal runs."""
        first, last = self.keys(rank).start, self.keys(rank).stop
        group = self.heads // self.key_heads
        found = [head // group - first for head in range(*self.queries(rank).indices(self.heads))]
        even = self.each % (last - first) == 0
        return None if even and found == [i * (last - first) // self.each for i in range(self.each)] else found


def trade(
    comm: Comm, sends: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], what: str
) -> list[list[Tensor]]:
    """Sends some tensors to each rank, in one message, and returns those that each rank sent, of these shapes."""
    like, peers = sends[comm.rank][0], comm.peers
    sent = {peer: torch.cat([tensor.reshape(-1) for tensor in sends[peer]]) for peer in peers}
    sizes = [[shape.numel() for shape in row] for row in shapes]
    received = {peer: torch.empty(sum(sizes[peer]), dtype=like.dtype, device=like.device) for peer in peers}
    comm.swap(sent, received, Label(PURPOSE, f"{what} of {like.shape[2]} tokens")).wait()
    rows = [list(sends[comm.rank]) for _ in range(comm.size)]
    for peer, flat in received.items():
        pieces = flat.split(sizes[peer])
        rows[peer] = [piece.view(shape) for piece, shape in zip(pieces, shapes[peer], strict=True)]
    return rows


class ToHeads(torch.autograd.Function):
    """This rank's tokens of all heads, to all tokens of this rank's heads: q, k and v (batch, heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, split: HeadSplit) -> tuple[Tensor, ...]:
        ctx.comm, ctx.split, ctx.shapes = comm, split, [one.shape for one in (q, k, v)]
        sends = [_of_rank((q, k, v), split, rank) for rank in range(comm.size)]
        mine = [part.shape for part in sends[comm.rank]]
        rows = trade(comm, sends, [mine] * comm.size, "queries, keys and values")
        whole = tuple(torch.cat(parts, dim=2) for parts in zip(*rows, strict=True))
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm, split, shapes = ctx.comm, ctx.split, ctx.shapes
        tokens = shapes[0][2]
        sends = [[grad[:, :, rank * tokens : (rank + 1) * tokens] for grad in grads] for rank in range(comm.size)]
        expected = [_shapes(shapes, split, rank) for rank in range(comm.size)]
        rows = trade(comm, sends, expected, "gradients of queries, keys and values")
        q, k, v = zip(*rows, strict=True)
        return torch.cat(q, dim=1), _summed(k, split, shapes[1]), _summed(v, split, shapes[2]), None, None


class ToTokens(torch.autograd.Function):
    """All tokens of this rank's heads, to this rank's tokens of all heads: (batch, heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return _tokens(out, comm, "attention's output")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        comm = ctx.comm
        sends = [[part] for part in grad.chunk(comm.size, dim=1)]
        rows = trade(comm, sends, [[sends[0][0].shape]] * comm.size, "the gradient of attention's output")
        return torch.cat([row[0] for row in rows], dim=2), None


def _tokens(out: Tensor, comm: Comm, what: str) -> Tensor:
    sends = [[part] for part in out.chunk(comm.size, dim=2)]
    rows = trade(comm, sends, [[sends[0][0].shape]] * comm.size, what)
    return torch.cat([row[0] for row in rows], dim=1)


def _of_rank(given: Sequence[Tensor], split: HeadSplit, rank: int) -> list[Tensor]:
    q, k, v = given
    return [q[:, split.queries(rank)], k[:, split.keys(rank)], v[:, split.keys(rank)]]


def _shapes(shapes: Sequence[torch.Size], split: HeadSplit, rank: int) -> list[torch.Size]:
    """Of the parts that a rank has of this rank's tokens."""
    heads = [split.each] + [split.keys(rank).stop - split.keys(rank).start] * 2
    return [torch.Size((shape[0], n, *shape[2:])) for n, shape in zip(heads, shapes, strict=True)]


def _summed(parts: Sequence[Tensor], split: HeadSplit, shape: torch.Size) -> Tensor:
    """The gradient of key or value heads, of which several ranks may have had the same."""
    if sum(part.shape[1] for part in parts) == split.key_heads:
        return torch.cat(list(parts), dim=1)
    total = torch.zeros(shape, dtype=wide(parts[0].dtype), device=parts[0].device)
    for rank, part in enumerate(parts):
        total[:, split.keys(rank)] += part
    return total.to(parts[0].dtype)
