"""The ring: queries stay, and keys and values travel. In step t a rank sends its own to the rank t places on, which
merges them into its softmax in fp32, and so has exact attention after the last step, whatever the number of heads.

Keys and values are sent only to ranks whose queries can see them: with causal attention to later ones, with a window
not far. While one part is used, the next one travels. Backward sends them again, and each part's gradients, in fp32,
back to where the part came from.
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
    Span,
    Visible,
    wide,
)
from onefold.parallel.ulysses import PURPOSE


class RingOrder(NamedTuple):
    """Who sends keys and values to whom in which step."""

    comm: Comm
    tokens: int  # of each rank
    visible: Visible

    def span(self, rank: int) -> Span:
        return Span(rank * self.tokens, (rank + 1) * self.tokens)

    def source(self, step: int) -> int | None:
        """The rank whose keys and values this rank uses in a step, if any."""
        rank = (self.comm.rank - step) % self.comm.size
        return rank if self._sees(self.comm.rank, rank) else None

    def target(self, step: int) -> int | None:
        """The rank that uses this rank's keys and values in a step, if any."""
        rank = (self.comm.rank + step) % self.comm.size
        return rank if self._sees(rank, self.comm.rank) else None

    def _sees(self, queries: int, keys: int) -> bool:
        return self.visible.anything(self.span(queries), self.span(keys))


class Part(NamedTuple):
    """Keys and values on their way from one rank, or here."""

    source: int | None
    flat: Tensor
    pending: Pending


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: RingOrder, scale: float, tile: int) -> Tensor:
        comm = order.comm
        running = RunningAttention(q, order.span(comm.rank), k.shape[1], order.visible, scale, tile)
        flat = _packed(k, v)
        part = _start(order, 1, flat)
        running.add(k, v, order.span(comm.rank))
        for step in range(1, comm.size):
            part.pending.wait()
            following = _start(order, step + 1, flat)
            if part.source is not None:
                running.add(*_unpacked(part.flat, k, v), order.span(part.source))
            part = following
        out, sums = running.finish(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.order, ctx.scale, ctx.tile = order, scale, tile
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        order, comm = ctx.order, ctx.order.comm
        mine = order.span(comm.rank)
        gradients = AttentionGradients(q, mine, out, sums, grad, order.visible, ctx.scale, ctx.tile)
        flat = _packed(k, v)
        part = _start(order, 1, flat)
        of_mine = gradients.of_part(k, v, mine)
        for step in range(1, comm.size):
            part.pending.wait()
            following = _start(order, step + 1, flat)
            found = None
            if part.source is not None:
                found = gradients.of_part(*_unpacked(part.flat, k, v), order.span(part.source))
            _send_back(order, step, found, of_mine)
            part = following
        return gradients.q.to(q.dtype), of_mine.k.to(k.dtype), of_mine.v.to(v.dtype), None, None, None


def _start(order: RingOrder, step: int, mine: Tensor) -> Part:
    """Starts to send this rank's keys and values, and to receive those of another; nothing after the last step."""
    comm, source, target = order.comm, order.source(step), order.target(step)
    label = Label(PURPOSE, f"keys and values, step {step}")
    if step >= comm.size:
        return Part(None, mine, Pending(comm, label, ()))
    flat = torch.empty_like(mine) if source is not None else mine[:0]
    receives = {} if source is None else {source: flat}
    return Part(source, flat, comm.swap({} if target is None else {target: mine}, receives, label))


def _send_back(order: RingOrder, step: int, found: PartGradients | None, of_mine: PartGradients) -> None:
    """Sends the gradients of a part to its rank, and adds what comes back for this rank's keys and values."""
    source, target = order.source(step), order.target(step)
    sends = {} if source is None or found is None else {source: _packed(*found)}
    numel = of_mine.k.numel() + of_mine.v.numel()
    received = torch.empty(numel if target is not None else 0, dtype=wide(of_mine.k.dtype), device=of_mine.k.device)
    receives = {} if target is None else {target: received}
    order.comm.swap(sends, receives, Label(PURPOSE, f"gradients of keys and values, step {step}")).wait()
    if target is not None:
        k, v = _unpacked(received, *of_mine)
        of_mine.k.add_(k)
        of_mine.v.add_(v)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = flat.split([k.numel(), v.numel()])
    return first.view(k.shape), second.view(v.shape)
