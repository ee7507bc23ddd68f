"""The ring: queries stay, and keys and values travel. In step t a rank sends its own to the rank t places on, which
merges them into its softmax in fp32, and so has exact attention after the last step, whatever the number of heads.

Keys and values are sent only to ranks whose queries can see them: with causal attention to later ones, with a window
not far; of balanced stretches one piece or both. While one part is used, the next one travels. Backward sends them
again, and each part's gradients, in fp32, back to where the part came from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.parallel.exact_attention import (
    AttentionGradients,
    PartGradients,
    RunningAttention,
    Visible,
    wide,
)
from onefold.parallel.stretches import Span, pieces
from onefold.parallel.ulysses import PURPOSE


class Needed(NamedTuple):
    """What the queries of one rank may see of another's keys: where it lies in their tensor, and in the sequence."""

    tokens: slice
    at: tuple[Span, ...]


class RingOrder(NamedTuple):
    """Who sends which keys and values to whom in which step."""

    comm: Comm
    tokens: int  # of each rank
    visible: Visible
    balanced: bool

    def pieces(self, rank: int) -> tuple[Span, ...]:
        return pieces(rank, self.comm.size, self.tokens, balanced=self.balanced)

    def source(self, step: int) -> int:
        """The rank whose keys and values this rank uses in a step."""
        return (self.comm.rank - step) % self.comm.size

    def target(self, step: int) -> int:
        """The rank that uses this rank's keys and values in a step."""
        return (self.comm.rank + step) % self.comm.size

    def needed(self, queries: int, keys: int) -> Needed | None:
        """What one rank needs of the keys of another; None if it sees nothing of them."""
        mine, theirs = self.pieces(queries), self.pieces(keys)
        seen = [i for i, one in enumerate(theirs) if any(self.visible.anything(query, one) for query in mine)]
        if not seen:
            return None
        each = self.tokens // len(theirs)
        return Needed(slice(seen[0] * each, (seen[-1] + 1) * each), theirs[seen[0] : seen[-1] + 1])


class Part(NamedTuple):
    """Keys and values on their way from one rank."""

    needed: Needed | None
    flat: Tensor
    pending: Pending


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: RingOrder, scale: float, tile: int) -> Tensor:
        mine = order.pieces(order.comm.rank)
        running = RunningAttention(q, mine, k.shape[1], order.visible, scale, tile)
        part = _start(order, 1, k, v)
        running.add(k, v, mine)
        for step in range(1, order.comm.size):
            part.pending.wait()
            following = _start(order, step + 1, k, v)
            if part.needed is not None:
                running.add(*_unpacked(part.flat, k, v, part.needed), part.needed.at)
            part = following
        out, sums = running.finish(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.order, ctx.scale, ctx.tile = order, scale, tile
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        order = ctx.order
        mine = order.pieces(order.comm.rank)
        gradients = AttentionGradients(q, mine, out, sums, grad, order.visible, ctx.scale, ctx.tile)
        part = _start(order, 1, k, v)
        of_mine = gradients.of_part(k, v, mine)
        for step in range(1, order.comm.size):
            part.pending.wait()
            following = _start(order, step + 1, k, v)
            found = None
            if part.needed is not None:
                found = gradients.of_part(*_unpacked(part.flat, k, v, part.needed), part.needed.at)
            _send_back(order, step, found, of_mine)
            part = following
        return gradients.q.to(q.dtype), of_mine.k.to(k.dtype), of_mine.v.to(v.dtype), None, None, None


def _start(order: RingOrder, step: int, k: Tensor, v: Tensor) -> Part:
    """Starts to send this rank's keys and values, and to receive those of another; nothing after the last step."""
    comm, label = order.comm, Label(PURPOSE, f"keys and values, step {step}")
    if step >= comm.size:
        return Part(None, k[:0], Pending(comm, label, ()))
    source, target = order.source(step), order.target(step)
    mine, theirs = order.needed(target, comm.rank), order.needed(comm.rank, source)
    sends = {} if mine is None else {target: _packed(k[:, :, mine.tokens], v[:, :, mine.tokens])}
    flat = torch.empty(_numel(k, v, theirs), dtype=k.dtype, device=k.device)
    return Part(theirs, flat, comm.swap(sends, {} if theirs is None else {source: flat}, label))


def _send_back(order: RingOrder, step: int, found: PartGradients | None, of_mine: PartGradients) -> None:
    """Sends the gradients of a part to its rank, and adds what comes back for this rank's keys and values."""
    source, target = order.source(step), order.target(step)
    seen = order.needed(target, order.comm.rank)
    received = torch.empty(_numel(*of_mine, seen), dtype=wide(of_mine.k.dtype), device=of_mine.k.device)
    sends = {} if found is None else {source: _packed(*found)}
    receives = {} if seen is None else {target: received}
    order.comm.swap(sends, receives, Label(PURPOSE, f"gradients of keys and values, step {step}")).wait()
    if seen is not None:
        k, v = _unpacked(received, *of_mine, seen)
        of_mine.k[:, :, seen.tokens].add_(k)
        of_mine.v[:, :, seen.tokens].add_(v)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _numel(k: Tensor, v: Tensor, needed: Needed | None) -> int:
    return 0 if needed is None else k[:, :, needed.tokens].numel() + v[:, :, needed.tokens].numel()


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, needed: Needed) -> tuple[Tensor, Tensor]:
    """Keys and values of the shape of what is needed of `k` and `v`."""
    shapes = [one[:, :, needed.tokens].shape for one in (k, v)]
    first, second = flat.split([shape.numel() for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])
