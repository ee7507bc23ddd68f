"""One order for all ranks: that in which rank 0 used and completed its units in the first backward."""

from __future__ import annotations

import json

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.unsharding import Unsharding

ORDER = Label("agree", "the order of units")


def agree_on_order(everyone: Comm, schedule: ReduceSchedule, unsharding: Unsharding) -> bool:
    """Follow what rank 0's first backward has shown, and hear which units any rank used. True once, when it happens."""
    if schedule.agreed:
        return False
    mine = [schedule.order_seen(), unsharding.forward_seen, unsharding.backward_seen]
    order, forward, backward = json.loads(everyone.broadcast_bytes(json.dumps(mine).encode(), ORDER))
    units = range(len(unsharding.units))
    flags = bytes(index in seen for seen in map(set, mine[1:]) for index in units)
    used = everyone.all_reduce_max(flags, ORDER)
    schedule.learn(order)
    unsharding.learn(
        forward, backward,
        used_in_forward={index for index in units if used[index]},
        used_in_backward={index for index in units if used[len(units) + index]},
    )  # fmt: skip
    return True
