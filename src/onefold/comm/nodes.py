"""How the ranks of an axis lie on nodes. The same on all ranks."""

from __future__ import annotations

import os

from onefold.comm.mesh import Axis
from onefold.comm.strategy import equal_per_node


def ranks_per_node(axis: Axis) -> int:
    """How many ranks of the axis each node has, if they are as many on each and follow each other; else 1.

    torchrun and Onefold's launcher number ranks node by node, LOCAL_WORLD_SIZE on each.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "8" if axis.plays else "1")
    return equal_per_node(axis.world_ranks, axis.node_ranks or int(told))


def node_axes(axis: Axis, per_node: int) -> tuple[Axis, Axis]:
    """The ranks of the axis on this rank's node, and those at the same place on the other nodes."""
    node, place = divmod(axis.rank, per_node)
    return (
        Axis(axis.group, place, per_node, axis.world_ranks[node * per_node : (node + 1) * per_node], axis.plays),
        Axis(axis.group, node, axis.size // per_node, axis.world_ranks[place::per_node], axis.plays),
    )
