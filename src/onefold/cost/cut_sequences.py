"""Sequences cut over ranks, in closed form: what a rank keeps of its stretch, and what attention sends. Numbers only.

Attention is by Ulysses where the ranks divide the heads, else by the ring over balanced stretches: see parallel/.
Formulas are for causal attention without documents and windows.
"""

from __future__ import annotations

from dataclasses import replace

from onefold.cost.activations import ActivationBytes
from onefold.cost.shapes import Shape

WIDE = 4  # bytes of an element of gradients that the ring sends back


def cut_shape(shape: Shape, ranks: int) -> Shape:
    """A shape whose sequences are as long as one rank's stretch."""
    return shape if ranks == 1 else replace(shape, seq=-(-shape.seq // ranks))


def by_ulysses(shape: Shape, tp: int, ranks: int) -> bool:
    return shape.heads // tp % ranks == 0


def with_trades(
    found: ActivationBytes, shape: Shape, batch: int, policy: str, tp: int, ranks: int, itemsize: int
) -> ActivationBytes:
    """The activations of a stretch, and what attention holds beside them: Ulysses keeps its output twice, of some
    heads and of some tokens, and has what it sends and receives; the ring has two parts of keys and values."""
    if ranks == 1:
        return found
    tokens = batch * -(-shape.seq // ranks) * itemsize // tp
    if not by_ulysses(shape, tp, ranks):
        return found._replace(widest=found.widest + tokens * 4 * shape.key_numel)
    output, traded = tokens * shape.attention_numel, 2 * tokens * (shape.attention_numel + 2 * shape.key_numel)
    found = found._replace(widest=max(found.widest, traded))
    if policy == "keep":
        return found._replace(kept_per_block=found.kept_per_block + output)
    return found._replace(block=found.block + output)


def attention_bytes(shape: Shape, batch: int, policy: str, tp: int, ranks: int, itemsize: int) -> int:
    """Bytes that one rank sends per block, in forward and backward, and in another forward where it is recomputed; of
    the ring, the mean of all ranks."""
    if ranks == 1:
        return 0
    tokens, forwards = batch * -(-shape.seq // ranks), 1 if policy == "keep" else 2
    queries, keys = shape.attention_numel // tp, shape.key_numel // tp
    if not by_ulysses(shape, tp, ranks):
        sent = tokens * 2 * keys * (ranks - 1) * ((forwards + 1) * itemsize + WIDE)
        return sent * 3 // 4
    shared = max(keys, shape.head_numel * ranks)  # where ranks need the same key head, each is sent it
    return tokens * (ranks - 1) * (2 * queries + 2 * shared) * (forwards + 1) * itemsize // ranks


def attention_calls(shape: Shape, policy: str, tp: int, ranks: int) -> int:
    """Messages of one block."""
    forwards = 1 if policy == "keep" else 2
    return 2 * (forwards + 1) if by_ulysses(shape, tp, ranks) else (ranks - 1) * (forwards + 2)
