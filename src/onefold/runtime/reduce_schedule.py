"""The reduce schedule: in which order units are reduce-scattered in backward, and how many are in flight at once.

Every rank starts the reductions of a backward in the same order: registration order reversed at first, then the order
in which rank 0's units became complete in the first backward. A unit is complete when as many gradients have arrived as
in recent backwards; a complete unit waits for the reductions before it in the order. Where too many units wait for one,
that one counts as skipped in this backward and is reduced as it is; if its gradients come after all, they are reduced
by themselves later. What is not reduced when backward ends is reduced then, in the same order. So ranks may skip,
branch or repeat modules; the sequence of collectives stays the same, and no rank keeps all gradients. When a reduction
starts depends on the gradients of this rank alone, not on how fast messages are: every stage adds the same numbers in
one order.

To finish a reduction makes compute wait for it. So on CUDA more of them are in flight while they fit into memory that
this backward has freed, and none is waited for then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from onefold.comm.freed import FreedMemory
from onefold.cost.limits import IN_FLIGHT, WAITING
from onefold.runtime.unit_order import with_missing
from onefold.state.unit import Unit

REMEMBERED = 8  # backwards or steps for which a unit that was used once is expected again


class ReduceSchedule:
    def __init__(
        self,
        units: Sequence[Unit],
        on_start: Callable[[int], None],
        on_reduced: Callable[[int, bool], None],
        freed: FreedMemory,
    ) -> None:
        self._units, self._on_start, self._on_reduced, self._freed = units, on_start, on_reduced, freed
        self.one_reduction = False  # see `one_reduction_each`
        self.order = list(reversed(range(len(units))))
        self.agreed = False  # whether the order is rank 0's in its first backward
        self.completed: list[int] = []  # units complete in this backward, in the order of their last gradients
        self._counts = [deque([len(unit.params)], maxlen=REMEMBERED) for unit in units]
        self._unused = [0] * len(units)  # steps since some rank used a unit
        self._in_flight: deque[tuple[int, bool]] = deque()  # unit, and whether this is the last backward of the step
        self.begin(final=True)

    def one_reduction_each(self, one: bool = True) -> None:
        """From now on every unit has exactly one reduction per backward, and none counts as skipped before its end; or
        no longer."""
        self.one_reduction = one

    def begin(self, *, final: bool) -> None:
        """Begins a backward; `final` if it is the last one of a step."""
        self._final = final
        self._freed.begin()
        self.completed = []
        self._arrived = [0] * len(self._units)
        self._expected = [self._expected_count(index) for index in range(len(self._units))]
        self._first = True  # no gradient has arrived
        self._next = 0
        self._started: set[int] = set()

    def arrived(self, index: int, *, start: bool) -> bool:
        """Counts a gradient of a unit, and with `start` starts every reduction that may start: with the first gradient
        of a backward, and when a unit becomes complete. True if the unit is complete."""
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
        """The number of gradients of a unit in this backward."""
        return self._arrived[index]

    def flush(self, *, start: bool) -> None:
        """Ends a backward: with `start` starts the remaining reductions, and remembers how many gradients came."""
        while start and self._next < len(self.order):
            self._start_next()
        for count, arrived in zip(self._counts, self._arrived, strict=True):
            if arrived:
                count.append(arrived)

    def step_over(self, index: int, *, used: bool) -> None:
        """Records whether any rank used a unit in this step; after some steps without use, no unit waits for it."""
        self._unused[index] = 0 if used else self._unused[index] + 1

    def waiting(self) -> bytes:
        """Which units hold gradients that no reduction has taken, a flag each."""
        return bytes(unit.gradients.waiting for unit in self._units)

    def reduce_late(self, waiting: bytes) -> None:
        """Starts one more reduction of every unit that waits on some rank, a flag each, which all ranks agreed on."""
        for index in self.order:
            if waiting[index]:
                self._start(index)

    def finish(self, index: int) -> None:
        """Finishes reductions, the oldest first, until none of this unit is in flight."""
        while any(index == other for other, _ in self._in_flight):
            self._finish_oldest()

    def drain(self) -> None:
        """Finishes all reductions in flight."""
        while self._in_flight:
            self._finish_oldest()

    def learn(self, order: list[int]) -> None:
        """All ranks follow this order from now on."""
        self.order, self.agreed = order, True

    def order_seen(self) -> list[int]:
        """The order in which units became complete in this backward. Those that did not have the place that the order
        of registration suggests: backward comes to units in the reverse of it."""
        return with_missing(self.completed[::-1], range(len(self._units)))[::-1]

    def _may_start(self, index: int) -> bool:
        if self._complete(index):
            return True
        if self.one_reduction:
            return False
        waiting = [other for other in self.completed if other not in self._started]
        return self.agreed and len(waiting) >= WAITING

    def _complete(self, index: int) -> bool:
        skipped = self._unused[index] >= REMEMBERED and not self.one_reduction
        return skipped or self._arrived[index] >= self._expected[index]

    def _expected_count(self, index: int) -> int:
        """Gradients of a unit per backward: the most in recent ones, or one per parameter before the first."""
        return max(max(self._counts[index]), len(self._units[index].params) if self.one_reduction else 0)

    def _start_next(self) -> None:
        self._started.add(self.order[self._next])
        self._start(self.order[self._next])
        self._next += 1

    def _start(self, index: int) -> None:
        while len(self._in_flight) >= IN_FLIGHT and not self._freed.holds(self._units[index].gradients.reducing_bytes):
            self._finish_oldest()
        self._on_start(index)
        self._units[index].gradients.launch()
        self._in_flight.append((index, self._final))

    def _finish_oldest(self) -> None:
        index, final = self._in_flight.popleft()
        self._units[index].gradients.finish()
        self._on_reduced(index, final)
