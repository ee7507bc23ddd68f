"""All-gathers of reduced gradients at stage 0, where every rank updates all of a unit and needs the full gradient."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.endpoint import Pending
from onefold.state.unit import Unit


class ReplicatedGradients:
    """The all-gathers in flight; without `wanted`, where the optimizer is sharded, all methods are no-ops."""

    def __init__(self, units: Sequence[Unit], *, wanted: bool) -> None:
        self._units, self.wanted = units, wanted
        self._in_flight: list[Pending] = []
        self._reduced: set[int] = set()  # units whose gradient is reduced and not gathered

    def reduced(self, index: int, *, gather: bool) -> None:
        """Called when a unit's gradient is reduced; starts its all-gather, or without `gather` leaves it to
        `gather_all`."""
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
        """Waits for all-gathers in flight, and forgets the others: all gradients are about to be dropped."""
        self.wait()
        self._reduced.clear()

    def _gather(self, index: int) -> None:
        self._in_flight.append(self._units[index].gradients.gather())
        self._reduced.discard(index)
