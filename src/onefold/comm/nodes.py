"""How 16-bit gradients are summed over NCCL, from how the ranks of an axis lie on nodes. The same on all ranks.

| ranks of the axis | sum | sent by a rank, in bytes per parameter |
|---|---|---|
| at most 16, on one node or with few on each | all-to-all in 16 bits, fp32 sum in rank order | 2 (N-1)/N |
| three or more on each of several nodes | the same inside a node, then fp32 between nodes | 2 inside, 4/L between |
| otherwise | NCCL's reduce-scatter in fp32 | 4 (N-1)/N |

N ranks, L of them on each node. In the first case bits are those of gloo, whatever NCCL's algorithms do.
"""

from __future__ import annotations

import os
from collections import Counter
from enum import Enum

from onefold.comm.mesh import Axis

EXCHANGED = 16  # most ranks for an all-to-all: it sends N - 1 messages
WORTH = 3  # ranks on a node, from which a sum inside it saves bytes between nodes


class Sums(Enum):
    """How 16-bit gradients are summed over ranks; the value is what placement() says."""

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


def ranks_per_node(axis: Axis) -> int:
    """How many ranks of the axis each node has, if they are as many on each and follow each other; else 1.

    torchrun and Onefold's launcher number ranks node by node, LOCAL_WORLD_SIZE on each.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "8" if axis.plays else "1"))
    nodes = [rank // local for rank in axis.world_ranks]
    counts = set(Counter(nodes).values()) if nodes == sorted(nodes) else {1}
    return counts.pop() if len(counts) == 1 else 1


def node_axes(axis: Axis, per_node: int) -> tuple[Axis, Axis]:
    """The ranks of the axis on this rank's node, and those at the same place on the other nodes."""
    node, place = divmod(axis.rank, per_node)
    return (
        Axis(axis.group, place, per_node, axis.world_ranks[node * per_node : (node + 1) * per_node], axis.plays),
        Axis(axis.group, node, axis.size // per_node, axis.world_ranks[place::per_node], axis.plays),
    )
