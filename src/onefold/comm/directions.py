"""Two gloo groups between the same ranks: one for what is sent to higher ranks, one for what is sent to lower ranks.

gloo moves a message once its receiver has said that it is ready, and the receiver says so on the connection on which it
also sends. A rank whose shard is on its way, and who then begins to receive, would be heard only after that shard: the
two directions of an all-gather would take turns. With a connection for each direction they overlap.
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
    """The group for messages to lower ranks of an axis, whose own group carries those to higher ranks. Collective when
    it is new."""
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
    """Closes the connections of these groups, once their messages have completed."""
    _downward.clear()
