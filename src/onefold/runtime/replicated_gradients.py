"""All-gathers of reduced gradients at stage 0, where every rank updates all of a unit and needs the full gradient.

Where 16 bits compute, gradients are fp32 once they have accumulated. A rank that accumulates does not know whether its
peers do: until all ranks know of it, messages have the dtype that gradients have before, and they are gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.comm.endpoint import Pending
from onefold.runtime.accumulating import Accumulating
from onefold.state.unit import Unit


class ReplicatedGradients:
    """The all-gathers in flight; without `wanted`, where the optimizer is sharded, all methods are no-ops."""

    def __init__(self, units: Sequence[Unit], accumulating: Accumulating, *, wanted: bool) -> None:
        self._units, self._accumulating, self.wanted = units, accumulating, wanted
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

    def gather_again(self) -> None:
        """All ranks have learnt that gradients have accumulated on some: gathers those of this step anew, in fp32. No
        reduction is in flight."""
        self.wait()
        for index, unit in enumerate(self._units):
            if unit.gradients.widens and unit.gradients.reduced:
                unit.gradients.widen_reduced()
                if index not in self._reduced:
                    self._gather(index)

    def _gather(self, index: int) -> None:
        gradients = self._units[index].gradients
        known = self._accumulating.wide_everywhere
        self._in_flight.append(gradients.gather() if known else gradients.gather_unwidened())
        self._reduced.discard(index)
