"""Which tokens of a sequence each rank has: neighbouring ones, or two pieces that balance the work of causal attention.

A token of causal attention sees all before it, so later tokens cost more. Of 2N pieces of a sequence, a balanced rank i
of N has the i-th from the start and the i-th from the end, which together cost the same on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Half-open range of positions in the whole sequence."""

    start: int
    stop: int


def pieces(rank: int, ranks: int, tokens: int, *, balanced: bool) -> tuple[Span, ...]:
    """The pieces of one rank, in the order in which it has them; each rank has `tokens` of them, of which a balanced
    one needs an even number."""
    if not balanced:
        return (Span(rank * tokens, (rank + 1) * tokens),)
    half, last = tokens // 2, 2 * ranks - 1 - rank
    return Span(rank * half, (rank + 1) * half), Span(last * half, (last + 1) * half)


def in_order(stretches: Tensor, ranks: int, dim: int) -> Tensor:
    """The whole sequence, of the balanced stretches of all ranks one behind the other along `dim`."""
    halves = stretches.chunk(2 * ranks, dim)
    return torch.cat([*halves[::2], *halves[::-2]], dim)


def by_rank(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The balanced stretches of all ranks one behind the other, of the whole sequence."""
    halves = whole.chunk(2 * ranks, dim)
    return torch.cat([half for rank in range(ranks) for half in (halves[rank], halves[2 * ranks - 1 - rank])], dim)
