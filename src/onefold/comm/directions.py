"""Two gloo groups between the same ranks: one for what is sent to higher ranks, one for what is sent to lower ranks.

gloo sends a message only after the receiver has announced that it is ready, and the announcement uses the connection on
which the receiver also sends. If a rank posts its receive while its own shard is being sent, the announcement queues
behind that shard, and the two directions of an all-gather run one after the other. With one connection per direction
they overlap.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch.distributed as dist

from onefold.comm.mesh import Axis, new_gloo_axis

_downward: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by the ranks of an axis
_world: Any = None  # torch's default group when they were made
_worlds = 0  # default groups so far, counted alike on all ranks


def downward_group(axis: Axis, timeout_s: float) -> dist.ProcessGroup:
    """The group for messages to lower ranks of an axis, whose own group carries those to higher ranks. Collective on
    the first call for these ranks."""
    global _world, _worlds
    if axis.plays is not None:
        return axis.group
    if _world is not dist.group.WORLD:
        _downward.clear()
        _world, _worlds = dist.group.WORLD, _worlds + 1
    if axis.world_ranks not in _downward:
        name = f"{_worlds}/down/{crc32(repr(axis.world_ranks).encode())}"
        _downward[axis.world_ranks] = new_gloo_axis(axis, name, timeout_s).group
    return _downward[axis.world_ranks]


def end_directions() -> None:
    """Drops these groups; their connections close when no communicator uses them."""
    _downward.clear()
