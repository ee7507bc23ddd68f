"""Two gloo groups between the same ranks: one for what is sent to higher ranks, one for what is sent to lower ranks.

gloo sends a message only after the receiver has announced that it is ready, and the announcement uses the connection on
which the receiver also sends. If a rank posts its receive while its own shard is being sent, the announcement queues
behind that shard, and the two directions of an all-gather run one after the other. With one connection per direction
they overlap.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from onefold.comm.mesh import Axis, new_gloo_axis

# By the group of an axis, which carries messages to higher ranks: when torch destroys that one, both close.
_downward: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def has_downward_group(axis: Axis) -> bool:
    """Whether this rank has made the group for messages to lower ranks of an axis."""
    return axis.plays is not None or axis.group in _downward


def downward_group(axis: Axis, name: str, timeout_s: float) -> dist.ProcessGroup:
    """The group for messages to lower ranks of an axis. With a `name`, which all its ranks give and no other group has,
    a new one: collective."""
    if axis.plays is not None:
        return axis.group
    if name:
        _downward[axis.group] = new_gloo_axis(axis, name, timeout_s).group
    return _downward[axis.group]


def end_directions() -> None:
    """Drops these groups; their connections close when no communicator uses them."""
    _downward.clear()
