"""What to reduce next: one order for all ranks, a bounded number in flight.

Every rank starts the reductions of a backward in the same order: registration order reversed at first, then the order
in which rank 0's units became complete in the first backward. A unit is complete when as many gradients have arrived as
in recent backwards; a complete unit waits for those before it in the order. Where too many wait for one, that one is
taken to be skipped in this backward and starts as it is; should its gradients come after all, they take a reduction of
their own later. Whatever is still open when backward ends is started then, in the same order. So ranks may skip, branch
or repeat; the sequence of collectives stays the same, and no rank holds all gradients. When a reduction starts depends
on the gradients of this rank alone, not on how fast messages travel: every stage adds the same numbers in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from onefold.cost.limits import IN_FLIGHT, WAITING
from onefold.state.unit import Unit

REMEMBERED = 8  # backwards or steps; what is used now and then is expected for that long


class ReduceSchedule:
    def __init__(
        self, units: Sequence[Unit], on_start: Callable[[int], None], on_reduced: Callable[[int, bool], None]
    ) -> None:
        self._units, self._on_start, self._on_reduced = units, on_start, on_reduced
        self.patient = False  # see `one_reduction_each`
        self.order = list(reversed(range(len(units))))
        self.agreed = False  # the order is one that a backward has shown
        self.completed: list[int] = []  # in this backward, by the time of their last gradient
        self._counts = [deque([len(unit.params)], maxlen=REMEMBERED) for unit in units]
        self._unused = [0] * len(units)  # steps since some rank used a unit
        self._in_flight: deque[tuple[int, bool]] = deque()  # unit, and whether of a step's last backward
        self.begin(final=True)

    def one_reduction_each(self) -> None:
        """From now on a unit has one reduction in a backward: none counts as skipped before backward ends."""
        self.patient = True

    def begin(self, *, final: bool) -> None:
        """A backward starts."""
        self._final = final
        self.completed = []
        self._arrived = [0] * len(self._units)
        self._expected = [self._usual(index) for index in range(len(self._units))]
        self._first = True  # no gradient has arrived
        self._next = 0
        self._started: set[int] = set()

    def arrived(self, index: int, *, start: bool) -> bool:
        """One gradient has been added to a unit; start every reduction that may start: some do with the first gradient
        of a backward, others when a unit becomes complete. True if as many came as usual."""
        arrived = self._arrived[index] = self._arrived[index] + 1
        if arrived == self._expected[index]:
            self.completed.append(index)
        elif not self._first:
            return arrived > self._expected[index]
        self._first = False
        while start and self._next < len(self.order) and self._may_start(self.order[self._next]):
            self._start_next()
        return arrived >= self._expected[index]

    def started(self, index: int) -> bool:
        """Whether this backward has started a unit's reduction."""
        return index in self._started

    def count(self, index: int) -> int:
        """Gradients that this backward has brought to a unit."""
        return self._arrived[index]

    def flush(self, *, start: bool) -> None:
        """Backward is over: start what is left and remember how many gradients came."""
        while start and self._next < len(self.order):
            self._start_next()
        for count, arrived in zip(self._counts, self._arrived, strict=True):
            if arrived:
                count.append(arrived)

    def step_over(self, index: int, *, used: bool) -> None:
        """Whether any rank has used a unit in this step: after a while without, nobody waits for it."""
        self._unused[index] = 0 if used else self._unused[index] + 1

    def waiting(self) -> bytes:
        """Which units hold gradients that no reduction has taken, a flag each."""
        return bytes(unit.gradients.waiting for unit in self._units)

    def reduce_late(self, waiting: bytes) -> None:
        """One more reduction for the units that wait on some rank, a flag each, which all ranks agreed on."""
        for index in self.order:
            if waiting[index]:
                self._start(index)

    def finish(self, index: int) -> None:
        """End reductions, oldest first, until this unit has none in flight."""
        while any(index == other for other, _ in self._in_flight):
            self._retire()

    def drain(self) -> None:
        while self._in_flight:
            self._retire()

    def learn(self, order: list[int]) -> None:
        """All ranks follow this order from now on."""
        self.order, self.agreed = order, True

    def order_seen(self) -> list[int]:
        """The order this backward showed; units that never became complete come last."""
        return self.completed + [index for index in self.order if index not in self.completed]

    def _may_start(self, index: int) -> bool:
        if self._complete(index):
            return True
        if self.patient:
            return False
        waiting = [other for other in self.completed if other not in self._started]
        return self.agreed and len(waiting) >= WAITING

    def _complete(self, index: int) -> bool:
        skipped = self._unused[index] >= REMEMBERED and not self.patient
        return skipped or self._arrived[index] >= self._expected[index]

    def _usual(self, index: int) -> int:
        """Gradients per backward: the most there were lately, counting one for each parameter as seen at first."""
        return max(max(self._counts[index]), len(self._units[index].params) if self.patient else 0)

    def _start_next(self) -> None:
        self._started.add(self.order[self._next])
        self._start(self.order[self._next])
        self._next += 1

    def _start(self, index: int) -> None:
        while len(self._in_flight) >= IN_FLIGHT:
            self._retire()
        self._on_start(index)
        self._units[index].gradients.launch()
        self._in_flight.append((index, self._final))

    def _retire(self) -> None:
        index, final = self._in_flight.popleft()
        self._units[index].gradients.finish()
        self._on_reduced(index, final)
