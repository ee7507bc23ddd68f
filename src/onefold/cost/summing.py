"""Bytes that a device reads and writes for a gradient between autograd and the optimizer. Numbers only.

Beside the copy into a flat buffer, these are the kernels that sum over ranks, each of which reads and writes its whole
operands: a sum in fp32 of 16-bit parts converts the first one, adds each other one to a vector of fp32, scales that
vector and rounds it. So a sum over N parts costs several times the bytes of its parts, for each of a rank's elements.
"""

from __future__ import annotations

from onefold.comm.strategy import WIDE, Strategy, Sums
from onefold.settings.widths import Widths


def moved_per_gradient(
    widths: Widths, strategy: Strategy, *, replicas: int = 1, accumulates: bool = False, flat: bool = True
) -> float:
    """Bytes for one element of a micro-batch's gradient: to add it to those of other micro-batches, or else to copy it
    into a `flat` buffer; and to sum it over ranks and replicas.

    >>> from onefold.comm.strategy import over_nccl
    >>> from onefold.settings.widths import widths_of
    >>> narrow = widths_of("bf16", "split")
    >>> [round(moved_per_gradient(narrow, over_nccl(ranks, 8)), 1) for ranks in (1, 2, 8, 64)]
    [4.0, 19.0, 15.2, 19.3]
    """
    many = strategy.ranks * replicas > 1
    wire = widths.wire if many else widths.compute
    if accumulates:
        copied = widths.compute + 2 * WIDE + (widths.sums + wire if many and wire != widths.sums else 0)
    else:
        copied = widths.compute + wire if flat else 0
    return copied + summed(widths, strategy, replicas)


def summed(widths: Widths, strategy: Strategy, replicas: int = 1) -> float:
    """Bytes for one element of a unit to sum it over the ranks of a strategy and over replicas: what NCCL's sums read
    and write too, and not what an all-to-all does."""
    ranks = strategy.ranks
    if ranks * replicas == 1:
        return 0.0
    rounded = (WIDE + widths.grad) / ranks if widths.narrow or replicas > 1 else 0.0
    return _over_ranks(widths, strategy) + _over_replicas(strategy, replicas) / ranks + rounded


def _over_ranks(widths: Widths, strategy: Strategy) -> float:
    ranks, wire, how = strategy.ranks, widths.wire, strategy.sums(widths.wire)
    if how is Sums.BY_NODE:
        near, nodes = strategy.per_node, ranks // strategy.per_node
        sorted_by_rank, between = 2 * wire, _by_nccl(WIDE, nodes) / near
        return sorted_by_rank + _in_fp32(wire, near) / near + between + 2 * WIDE / ranks
    if how is Sums.BY_NCCL and ranks > 1:
        return _by_nccl(wire, ranks) + (_in_fp32(wire, 1) if widths.narrow else 2 * wire) / ranks
    return (_in_fp32(wire, ranks) if widths.narrow else 3 * wire * (ranks - 1)) / ranks


def _over_replicas(strategy: Strategy, replicas: int) -> float:
    """Bytes for one element of a shard to sum it over replicas in fp32, each of which sums a part; a sum of NCCL's is
    copied out of its buffer."""
    if replicas == 1:
        return 0.0
    if strategy.wide is Sums.BY_NCCL:
        return _by_nccl(WIDE, replicas) + 2 * WIDE / replicas
    return 3 * WIDE * (replicas - 1) / replicas


def _by_nccl(width: int, ranks: int) -> float:
    """Bytes for one element that NCCL sums: it reads all elements, and writes those that this rank owns."""
    return width * (1 + 1 / ranks)


def _in_fp32(wire: int, parts: int) -> int:
    """Bytes for one element of a sum in fp32: the first part is converted, the others are added, all is scaled. One
    part that is fp32 already is only scaled."""
    first = wire + WIDE if parts > 1 or wire != WIDE else 0
    return first + (parts - 1) * (wire + 2 * WIDE) + 2 * WIDE
