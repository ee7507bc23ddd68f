"""One order for all ranks: that in which rank 0 used and completed its units in the first backward."""

from __future__ import annotations

import json

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.unsharding import Unsharding


def agree_on_order(everyone: Comm, schedule: ReduceSchedule, unsharding: Unsharding) -> bool:
    """Tell all ranks what this rank's first backward has shown, and follow rank 0's. True once, when it happens."""
    if schedule.agreed:
        return False
    mine = [schedule.order_seen(), unsharding.forward_seen, unsharding.backward_seen]
    blobs = everyone.exchange(json.dumps(mine).encode(), Label("agree", "the order of units"))
    ranks = [json.loads(blob) for blob in blobs]
    schedule.learn(ranks[0][0])
    unsharding.learn([rank[1] for rank in ranks], [rank[2] for rank in ranks])
    return True
