"""Attention over tiles of queries and keys, in fp32, whose softmax is merged exactly: for keys that arrive in parts,
and for masks that no kernel of torch knows without a tensor of tokens × tokens.

Of each query three things are kept over all keys seen so far: the largest score, the sum of exponentials relative to
it, and the sum of values weighted by them. Another part of the keys rescales the sums if it has a larger score. At the
end the output is their quotient, and the logarithm of the denominator (log-sum-exp) is all that backward needs to know
of the softmax: it computes each tile's scores again. Memory is that of one tile, beside the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.parallel.stretches import Span

TILE = 1024  # queries, and keys


class Visible(NamedTuple):
    """Which keys a query sees. Positions are those in the whole sequence."""

    causal: bool
    window: int | None = None  # a query sees so many positions: its own and those before it; also after if not causal
    documents: Tensor | None = None  # (batch, whole sequence): equal ids see each other; negative ones are padding

    def anything(self, queries: Span, keys: Span) -> bool:
        """False if no query of one span sees a key of the other, whatever the documents are."""
        if self.causal and keys.start >= queries.stop:
            return False
        behind, ahead = queries.start - (keys.stop - 1), keys.start - (queries.stop - 1)
        return self.window is None or max(behind, ahead) < self.window

    def mask(self, queries: Span, keys: Span, device: torch.device) -> Tensor | None:
        """True where a query sees a key, as (batch or 1, 1, 1, queries, keys); None if all see all."""
        found = self._by_position(queries, keys, device)
        if self.documents is None:
            return found
        rows, columns = self.documents[:, slice(*queries), None], self.documents[:, None, slice(*keys)]
        same = ((rows == columns) & (rows >= 0))[:, None, None]
        return same if found is None else same & found

    def _by_position(self, queries: Span, keys: Span, device: torch.device) -> Tensor | None:
        furthest = max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start)
        inside = self.window is None or furthest < self.window
        if inside and (not self.causal or keys.stop - 1 <= queries.start):
            return None
        apart = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)
        found = apart >= 0 if self.causal else torch.ones_like(apart, dtype=torch.bool)
        return found if self.window is None else found & (apart.abs() < self.window)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.promote_types(dtype, torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def spans(pieces: Sequence[Span], tile: int) -> Iterator[tuple[slice, Span]]:
    """Tiles of pieces that lie one behind the other in a tensor: where each lies there, and in the whole sequence."""
    before = 0  # tokens of earlier pieces
    for piece in pieces:
        for start in range(piece.start, piece.stop, tile):
            stop = min(start + tile, piece.stop)
            yield slice(before + start - piece.start, before + stop - piece.start), Span(start, stop)
        before += piece.stop - piece.start


class RunningAttention:
    """Attention of queries (batch, heads, tokens, width) to keys that arrive in parts (batch, fewer heads, tokens,
    width), each with the positions of its tokens."""

    def __init__(
        self, q: Tensor, at: Sequence[Span], key_heads: int, visible: Visible, scale: float, tile: int = TILE
    ) -> None:
        self._q, self._at, self._visible, self._scale, self._tile = _grouped(q, key_heads), at, visible, scale, tile
        rows = self._q.shape[:-1]
        self._largest = torch.full(rows, -math.inf, dtype=wide(q.dtype), device=q.device)
        self._total = torch.zeros(rows, dtype=wide(q.dtype), device=q.device)
        self._values: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, at: Sequence[Span]) -> None:
        if self._values is None:
            shape = (*self._q.shape[:-1], v.shape[-1])
            self._values = torch.zeros(shape, dtype=wide(v.dtype), device=v.device)
        for rows, queries in spans(self._at, self._tile):
            for columns, keys in spans(at, self._tile):
                if self._visible.anything(queries, keys):
                    scores = _scores(self._q[:, :, :, rows], k[:, :, columns], self._scale)
                    mask = self._visible.mask(queries, keys, k.device)
                    if mask is not None:
                        scores.masked_fill_(~mask, -math.inf)
                    self._merge(rows, scores, v[:, :, columns], self._values)

    def _merge(self, rows: slice, scores: Tensor, v: Tensor, values: Tensor) -> None:
        before, total = self._largest[..., rows], self._total[..., rows]
        largest = torch.maximum(before, scores.amax(-1))
        finite = torch.where(largest == -math.inf, 0, largest)  # of a query that has seen nothing
        weights, kept = scores.sub_(finite[..., None]).exp_(), (before - finite).exp()
        total.mul_(kept).add_(weights.sum(-1))
        part = values[:, :, :, rows]
        part.mul_(kept[..., None]).add_(_ungrouped_product(weights, _widened(v)))
        before.copy_(largest)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output (batch, heads, tokens, width), and the log-sum-exp (batch, key heads, group, tokens), in fp32. A
        query that saw no key has zeros, and an infinite log-sum-exp, by which its weights in backward are zeros."""
        assert self._values is not None, "no keys were added"
        nothing = self._total == 0
        out = self._values / torch.where(nothing, 1, self._total)[..., None]
        sums = torch.where(nothing, math.inf, self._largest + self._total.log())
        by_token = out.permute(0, 3, 1, 2, 4).to(dtype).contiguous()  # as models go on with it, without another copy
        return by_token.flatten(2, 3).transpose(1, 2), sums


class PartGradients(NamedTuple):
    """The gradients of one part of the keys and values, in fp32."""

    k: Tensor
    v: Tensor


class AttentionGradients:
    """Gradients of attention, part by part of the keys. `q` has the sum of the queries' gradients over parts so far."""

    def __init__(
        self, q: Tensor, at: Sequence[Span], out: Tensor, sums: Tensor, grad: Tensor, visible: Visible, scale: float,
        tile: int = TILE,
    ) -> None:  # fmt: skip
        heads = sums.shape[1]
        self._q, self._at, self._visible, self._scale, self._tile = _grouped(q, heads), at, visible, scale, tile
        self._grad, self._sums = _grouped(grad, heads), sums
        self._slope = (_widened(self._grad) * _widened(_grouped(out, heads))).sum(-1)
        self._of_q = torch.zeros(self._q.shape, dtype=wide(q.dtype), device=q.device)

    @property
    def q(self) -> Tensor:
        return self._of_q.flatten(1, 2)

    def of_part(self, k: Tensor, v: Tensor, at: Sequence[Span]) -> PartGradients:
        found = PartGradients(torch.zeros_like(k, dtype=wide(k.dtype)), torch.zeros_like(v, dtype=wide(v.dtype)))
        for rows, queries in spans(self._at, self._tile):
            q, grad = _widened(self._q[:, :, :, rows]), _widened(self._grad[:, :, :, rows])
            for columns, keys in spans(at, self._tile):
                if not self._visible.anything(queries, keys):
                    continue
                part_k, part_v = _widened(k[:, :, columns]), _widened(v[:, :, columns])
                weights = _scores(q, part_k, self._scale).sub_(self._sums[..., rows, None]).exp_()
                mask = self._visible.mask(queries, keys, k.device)
                if mask is not None:
                    weights.masked_fill_(~mask, 0)
                found.v[:, :, columns] += _summed_product(weights, grad)
                slopes = _grouped_product(grad, part_v).sub_(self._slope[..., rows, None]).mul_(weights)
                slopes.mul_(self._scale)
                found.k[:, :, columns] += _summed_product(slopes, q)
                self._of_q[:, :, :, rows] += _ungrouped_product(slopes, part_k)
        return found


class TiledAttention(torch.autograd.Function):
    """Attention of one process, tile by tile: q, k and v are of the whole sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, tile: int) -> Tensor:
        at = (Span(0, q.shape[2]),)
        running = RunningAttention(q, at, k.shape[1], visible, scale, tile)
        running.add(k, v, at)
        out, sums = running.finish(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.visible, ctx.scale, ctx.tile = visible, scale, tile
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        at = (Span(0, q.shape[2]),)
        gradients = AttentionGradients(q, at, out, sums, grad, ctx.visible, ctx.scale, ctx.tile)
        part = gradients.of_part(k, v, at)
        return gradients.q.to(q.dtype), part.k.to(k.dtype), part.v.to(v.dtype), None, None, None


# -- products of grouped queries (batch, key heads, group, queries, width) with keys (batch, key heads, keys, width) --


def _grouped(heads: Tensor, key_heads: int) -> Tensor:
    return heads.unflatten(1, (key_heads, -1))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return _grouped_product(_widened(q), _widened(k)).mul_(scale)


def _grouped_product(rows: Tensor, columns: Tensor) -> Tensor:
    """(…, group, queries, width) and (…, keys, width) to (…, group, queries, keys)."""
    return (rows.flatten(2, 3) @ columns.transpose(-1, -2)).unflatten(2, rows.shape[2:4])


def _ungrouped_product(weights: Tensor, columns: Tensor) -> Tensor:
    """(…, group, queries, keys) and (…, keys, width) to (…, group, queries, width)."""
    return (weights.flatten(2, 3) @ columns).unflatten(2, weights.shape[2:4])


def _summed_product(weights: Tensor, rows: Tensor) -> Tensor:
    """(…, group, queries, keys) and (…, group, queries, width) to (…, keys, width)."""
    return weights.flatten(2, 3).transpose(-1, -2) @ rows.flatten(2, 3)
