"""What ranks know of those that hold other layers: along the mesh axis "pp" units differ."""

from __future__ import annotations

import json
from typing import NamedTuple

from onefold.comm.agreement import AGREE
from onefold.comm.communicator import Comm, Comms


class Pipeline(NamedTuple):
    """How many units other stages of a pipeline train, and which ranks are of this one."""

    most_units: int  # that any rank trains
    near: frozenset[int]  # of all ranks, those of this pipeline stage

    @classmethod
    def of(cls, comms: Comms, units: int) -> Pipeline:
        """Ranks tell each other how many units they train. Collective over a mesh with an axis "pp"; where there is
        none, all ranks are of one stage."""
        world, mine = comms.world, [comms.pp.rank, units]
        rows = [mine] * world.size
        if comms.pp.size > 1:
            rows = [json.loads(row) for row in world.exchange(json.dumps(mine).encode(), AGREE)]
        near = frozenset(world.world_rank(rank) for rank, row in enumerate(rows) if row[0] == mine[0])
        return cls(max(row[1] for row in rows), near)

    def rows(self, comm: Comm) -> list[int]:
        """The ranks of an axis that have the same units."""
        return [row for row in range(comm.size) if comm.simulated or comm.world_rank(row) in self.near]
