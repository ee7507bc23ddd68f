"""All-gathers of reduced gradients, where every rank updates all of a unit (stage 0) and needs its whole gradient."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.communicator import Pending
from onefold.state.unit import Unit


class ReplicatedGradients:
    """Does nothing where the optimizer is sharded."""

    def __init__(self, units: Sequence[Unit], *, wanted: bool) -> None:
        self._units, self.wanted = units, wanted
        self._in_flight: list[Pending] = []
        self._reduced: set[int] = set()  # units whose gradient is reduced and not gathered

    def reduced(self, index: int, *, gather: bool) -> None:
        """A unit's gradient is reduced; gather it at once, or when `gather_all` is called."""
        if self.wanted:
            self._reduced.add(index)
            if gather:
                self._gather(index)

    def gather_all(self) -> None:
        for index in sorted(self._reduced):
            self._gather(index)
        self.wait()

    def wait(self) -> None:
        for pending in self._in_flight:
            pending.wait()
        self._in_flight.clear()

    def drop(self) -> None:
        """All gradients are about to be dropped."""
        self.wait()
        self._reduced.clear()

    def _gather(self, index: int) -> None:
        self._in_flight.append(self._units[index].gradients.gather())
        self._reduced.discard(index)
