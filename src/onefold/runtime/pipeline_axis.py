"""What ranks know of those that hold other layers: along the mesh axis "pp" units differ."""

from __future__ import annotations

from typing import NamedTuple

from onefold.comm.agreement import AGREE
from onefold.comm.communicator import Comm, Comms
from onefold.comm.meter import Label


class Pipeline(NamedTuple):
    """The stages of a pipeline, of which this rank has one, and how many units they train."""

    most_units: int  # that any stage trains
    stages: int
    stage: int

    @classmethod
    def of(cls, comms: Comms, units: int) -> Pipeline:
        """The stages tell each other how many units they train. Collective over the mesh axis "pp"."""
        told = [int(row) for row in comms.pp.exchange(str(units).encode(), AGREE)]
        return cls(max(told), comms.pp.size, comms.pp.rank)

    def any_rank(self, comm: Comm, flags: bytes, label: Label) -> tuple[bytes, bool]:
        """Given a flag for each of this rank's units: the flags that any rank of this stage has set, and whether a rank
        of another stage has set one. One all-reduce of a flag per unit and stage. Collective."""
        start = self.stage * self.most_units
        said = bytes(start) + flags.ljust((self.stages - self.stage) * self.most_units, b"\0")
        heard = comm.all_reduce_max(said, label)
        here = slice(start, start + len(flags))
        return heard[here], any(heard[: here.start]) or any(heard[here.stop :])
