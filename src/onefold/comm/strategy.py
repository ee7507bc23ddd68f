"""How an axis of ranks sums gradients, what that sends, and the scratch that it takes. Integers only.

| gradients, and ranks of the axis | sum | sent by a rank, in bytes per parameter |
|---|---|---|
| over gloo | all-to-all, sum in rank order | w (N-1)/N |
| 16 bits over NCCL, at most 16 ranks | all-to-all in 16 bits, fp32 sum in rank order | 2 (N-1)/N |
| 16 bits, three or more on each of several nodes | the same inside a node, then fp32 between | 2 (L-1)/L + 4 (F-1)/N |
| otherwise | NCCL's reduce-scatter, in fp32 unless `Precision(wire=…)` is set | w (N-1)/N |

N ranks, L of them on each of F nodes; w bytes per element travel. A rank always sends (N-1)/N of the elements. Summed
in rank order bits are those of gloo, whatever NCCL's algorithms do. The wires and the planner's formulas both ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

EXCHANGED = 16  # most ranks for an all-to-all: it sends N - 1 messages
WORTH = 3  # ranks on a node, from which a sum inside it saves bytes between nodes
NARROW = 2  # bytes of a 16-bit number
WIDE = 4  # bytes of fp32


class Sums(Enum):
    """How 16-bit gradients are summed over ranks; the value is what placement() and plans say."""

    IN_RANK_ORDER = "16 bits travel, summed in fp32 in rank order"
    BY_NODE = "16 bits travel inside a node, fp32 between nodes; summed in fp32"
    BY_NCCL = "fp32 travels, summed by NCCL"


def sums_of(ranks: int, per_node: int) -> Sums:
    """How 16-bit gradients of an axis of so many ranks, of which each node has `per_node`, are summed over NCCL.

    >>> sums_of(8, 8).name, sums_of(64, 8).name, sums_of(64, 1).name
    ('IN_RANK_ORDER', 'BY_NODE', 'BY_NCCL')
    """
    if WORTH <= per_node < ranks:
        return Sums.BY_NODE
    return Sums.IN_RANK_ORDER if ranks <= EXCHANGED else Sums.BY_NCCL


def equal_per_node(world_ranks: Sequence[int], node_ranks: int) -> int:
    """How many of these ranks each node has, if they are as many on each and follow each other; else 1. Ranks are
    numbered node by node, `node_ranks` on each."""
    nodes = [rank // node_ranks for rank in world_ranks]
    counts = set(Counter(nodes).values()) if nodes == sorted(nodes) else {1}
    return counts.pop() if len(counts) == 1 else 1


class Strategy(NamedTuple):
    """How an axis of ranks sums gradients of 16 bits, and wider ones."""

    narrow: Sums
    wide: Sums
    ranks: int
    per_node: int = 1  # ranks of the axis on each node

    @property
    def own_sum(self) -> bool:
        """Whether 16-bit gradients may travel as they are: Onefold sums them in fp32. Also True for one rank."""
        return self.ranks == 1 or self.narrow is not Sums.BY_NCCL

    def sums(self, itemsize: int) -> Sums:
        """How gradients that travel with so many bytes per element are summed."""
        return self.narrow if itemsize == NARROW else self.wide

    def scratch_numel(self, shard_numel: int, itemsize: int) -> int:
        """Elements of scratch that a reduce-scatter needs beside its flat buffer, of the buffer's dtype."""
        slots = {
            Sums.IN_RANK_ORDER: self.ranks - 1,
            Sums.BY_NODE: self.ranks,
            Sums.BY_NCCL: min(self.ranks - 1, 1),
        }[self.sums(itemsize)]
        return shard_numel * slots

    def sent_bytes(self, shard_numel: int, itemsize: int) -> int:
        """Bytes that one rank sends in a reduce-scatter."""
        if self.sums(itemsize) is Sums.BY_NODE:
            return self.near_bytes(shard_numel, itemsize) + shard_numel * (self._nodes - 1) * WIDE
        return shard_numel * (self.ranks - 1) * itemsize

    def near_bytes(self, shard_numel: int, itemsize: int) -> int:
        """Of `sent_bytes`, those that an all-to-all sends to ranks of the same node; 0 for NCCL's own sums, whose ring
        is not known."""
        slots = {
            Sums.IN_RANK_ORDER: self.per_node - 1,
            Sums.BY_NODE: (self.per_node - 1) * self._nodes,
            Sums.BY_NCCL: 0,
        }[self.sums(itemsize)]
        return shard_numel * slots * itemsize

    def messages(self, itemsize: int) -> int:
        """Messages that one rank sends in a reduce-scatter."""
        by_node = self.sums(itemsize) is Sums.BY_NODE
        return self.per_node + self._nodes - 2 if by_node else self.ranks - 1

    def text(self, itemsize: int) -> str:
        """How gradients that travel with so many bytes per element are summed, in words."""
        sums = self.sums(itemsize)
        if itemsize == NARROW:
            return "16 bits travel, summed by NCCL in 16 bits" if sums is Sums.BY_NCCL else sums.value
        return "fp32 travels, summed in rank order" if sums is Sums.IN_RANK_ORDER else sums.value

    @property
    def _nodes(self) -> int:
        return self.ranks // self.per_node


def pairwise(ranks: int) -> Strategy:
    """Over gloo."""
    return Strategy(Sums.IN_RANK_ORDER, Sums.IN_RANK_ORDER, ranks)


def over_nccl(ranks: int, per_node: int) -> Strategy:
    """Over NCCL, where each node has so many ranks of the axis."""
    return Strategy(sums_of(ranks, per_node), Sums.BY_NCCL, ranks, per_node)


def max_rounds(ranks: int) -> int:
    """Rounds of an all-reduce of the maximum: ceil(log2 N).

    >>> [max_rounds(ranks) for ranks in (1, 2, 3, 4, 5, 4096)]
    [0, 1, 2, 2, 3, 12]
    """
    return (ranks - 1).bit_length()
