"""What to gather next: one list per pass, the same on every rank, with look-ahead.

A forward walks one list of units, a backward another. At first they are registration order and its reverse; then what
the first step showed. A rank that needs a unit first starts every gather that stands before it in the list and has not
been started; the end of the pass starts the rest. So ranks may skip or branch, and the sequence of gathers stays the
same. `prefetch` more are started ahead of need. A use that the list does not have (a unit needed again after its
release) is gathered when it comes: right as long as all ranks do the same.

In forward a unit is released when the next one is needed and it is idle; in backward when its gradients are complete.
Units that the list had and this rank skipped are released as soon as it is past them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onefold.unit import Unit
from onefold.values import Presence
from onefold.watch import Watch

AUTO = "auto"


class GatherSchedule:
    def __init__(self, units: Sequence[Unit], prefetch: int | str, live_bytes: int | None) -> None:
        self._units = units
        self._watch = Watch(units, live_bytes) if prefetch == AUTO else None
        self.prefetch = dict.fromkeys(
            ("gather-forward", "gather-backward"), 1 if isinstance(prefetch, str) else prefetch
        )
        self.forward = list(range(len(units)))
        self.backward = [index for index in reversed(self.forward[:-1])]  # the last one of forward is kept
        self.seen: list[int] = []  # gathers this pass wanted, in order
        self.trace: list[tuple[str, str]] = []  # every gather since the trace was last cleared: purpose, unit
        self._purpose, self._order = "gather-forward", list[int]()
        self._issued = self._needed = 0  # how far the pass has come in its list
        self._release_when_idle = False
        self._unclaimed: set[int] = set()  # started ahead of need, not needed yet
        self._busy: dict[int, int] = {}  # unit -> how many modules are computing with it
        self._live: set[int] = set()  # units that are not SHARDED

    def begin(self, purpose: str, order: list[int], *, release_when_idle: bool) -> None:
        """A pass starts."""
        self._purpose, self._order, self._release_when_idle = purpose, order, release_when_idle
        self._issued = self._needed = 0
        self.seen = []

    def need(self, index: int) -> None:
        """Make a unit whole now, and start what comes next."""
        values = self._units[index].values
        if values.presence is Presence.SHARDED or index in self._unclaimed:
            self.seen.append(index)
        position = self._position(index)
        if position is not None:
            self._needed = position + 1
            self._issue(upto=position + 1)
        elif values.presence is Presence.SHARDED:
            self._start(index)
        self._unclaimed.discard(index)
        self._release_passed(but=index)
        if position is not None:
            ahead = self.prefetch.get(self._purpose, 0)
            self._issue(upto=min(position + 1 + ahead, len(self._order)))
        if self._watch:
            self._watch.needed(index)
        values.finish_gather()
        if self._watch:
            self._watch.arrived(index)

    def hold(self, index: int) -> None:
        """A module begins to compute with a unit: it is not idle."""
        self.need(index)
        self._busy[index] = self._busy.get(index, 0) + 1

    def idle(self, index: int) -> None:
        """A module has ended."""
        self._busy[index] = max(self._busy.get(index, 0) - 1, 0)

    def busy(self, index: int) -> bool:
        return bool(self._busy.get(index))

    def done(self, index: int) -> None:
        """Nobody needs a unit any more in this pass."""
        if index not in self._unclaimed:
            self._release(index)

    def end(self, *, keep: int | None = None) -> None:
        """The pass is over: start what is left of its list, then release all but the unit to keep."""
        self._busy.clear()
        while self._issued < len(self._order):
            self._issue(upto=self._issued + 1)
            if self._order[self._issued - 1] != keep:
                self._release(self._order[self._issued - 1])
        for index in sorted(self._live - {keep}):
            self._release(index)
        if self._watch and self._order and (decided := self._watch.end_of_pass(self._purpose)) is not None:
            self.prefetch[self._purpose] = decided
        self._order, self._issued, self._needed = [], 0, 0

    def position(self, index: int) -> float:
        """Where a unit stands in the list of backward: the kept one before all, one that is not in it behind all."""
        if index in self.backward:
            return self.backward.index(index)
        return -1 if index == self.forward[-1] else math.inf

    def issue_through(self, index: int) -> None:
        """Start the gathers of the running pass up to a unit's, and as many ahead as a need of it would."""
        if index in self._order:
            ahead = self.prefetch.get(self._purpose, 0)
            self._issue(upto=min(self._order.index(index) + 1 + ahead, len(self._order)))

    def ready(self, index: int) -> bool:
        """Whole, and a need of it is known to the pass."""
        return self._units[index].values.presence is Presence.WHOLE and index not in self._unclaimed

    def _position(self, index: int) -> int | None:
        try:
            return self._order.index(index, self._needed)
        except ValueError:
            return None

    def _issue(self, upto: int) -> None:
        while self._issued < upto:
            index = self._order[self._issued]
            self._issued += 1
            self._start(index)
            self._unclaimed.add(index)

    def _start(self, index: int) -> None:
        self.trace.append((self._purpose, self._units[index].name))
        if self._watch:
            self._watch.started(index)
        self._units[index].values.start_gather(self._purpose)
        self._live.add(index)

    def _release_passed(self, but: int) -> None:
        ahead = set(self._order[self._needed : self._issued])
        for index in sorted(self._live - ahead - {but}):
            if index in self._unclaimed or (self._release_when_idle and not self._busy.get(index)):
                self._release(index)

    def _release(self, index: int) -> None:
        self._unclaimed.discard(index)
        values = self._units[index].values
        values.release()
        if values.presence is Presence.SHARDED:
            self._live.discard(index)
