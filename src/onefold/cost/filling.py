"""Bytes that a step would take on the device if other units kept their state there, from what its parts took."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from onefold.cost.limits import waiting_bytes

FILLED = 0.95  # of a device's memory


class Taken(NamedTuple):
    """The most bytes on the device in one part of a step."""

    nbytes: int
    reduced: frozenset[int] = frozenset()  # trained units, by number, whose gradients were complete when it ended
    coming: frozenset[int] = frozenset()  # trained units, by number, whose forward had not begun when it ended
    waited: int = 0  # bytes of gradients that waited there for host updates from its begin to its end


class UnitOnDevice(NamedTuple):
    """What one trained unit takes on the device if the device updates it, and if the host does."""

    state: int  # bytes of master and optimizer state
    gradient: int  # bytes of its gradient, from its reduction to step()
    state_now: int = 0  # bytes of `state` there now
    gradient_now: int = 0  # bytes of `gradient` there now
    made_now: int = 0  # bytes of `state_now` that this step made, in an update right after the reduction
    may_stay: bool = True
    waits: int = 0  # bytes of its gradient that wait there if the host updates it


def with_blocks(parts: Sequence[Taken], blocks: Sequence[frozenset[int]], nbytes: int) -> list[Taken]:
    """The parts of a step, if these blocks, each with the numbers of its trained units, kept `nbytes` more from their
    forward until their gradients are complete.

    >>> one, both = frozenset([1]), frozenset([0, 1])
    >>> parts = with_blocks([Taken(8, coming=one), Taken(9), Taken(5, one), Taken(3, both)], [one], 10)
    >>> [part.nbytes for part in parts]
    [8, 19, 15, 3]
    >>> parts = with_blocks([Taken(8, coming=both), Taken(5, frozenset([0]), one), Taken(3, both)], [one], 10)
    >>> [part.nbytes for part in parts]  # the block had no forward in this step, but may have one in the next
    [18, 15, 13]
    """
    found = []
    skipped = frozenset[int]().union(*(part.coming for part in parts if part.reduced))  # units without a forward
    for part, before in zip(parts, reduced_before(parts), strict=True):
        there = sum(not units or not (units <= before or units <= part.coming - skipped) for units in blocks)
        found.append(part._replace(nbytes=part.nbytes + there * nbytes))
    return found


def reduced_before(parts: Sequence[Taken]) -> list[frozenset[int]]:
    """For each part the units whose gradients were complete when it began: none where the gradients of a backward were
    dropped, and another forward begins.

    >>> one, both = frozenset([1]), frozenset([0, 1])
    >>> [sorted(units) for units in reduced_before([Taken(5, one), Taken(5, both), Taken(9, one), Taken(3, both)])]
    [[], [1], [], [1]]
    """
    before = [frozenset[int](), *(part.reduced for part in parts)]
    return [old if old <= part.reduced else frozenset() for old, part in zip(before, parts, strict=False)]


class Changes(NamedTuple):
    """How a set of units differs from the one before: which are new, and which have left it."""

    came: list[int]
    left: list[int]

    @classmethod
    def between(cls, before: frozenset[int], now: frozenset[int]) -> Changes:
        return cls(sorted(now - before), sorted(before - now))

    def of(self, nbytes: Sequence[int]) -> int:
        """By how much the sum over the set has grown."""
        grown = 0  # loops: a unit or none is in each, and they run for every part of a step and hundreds of splits
        for unit in self.came:
            grown += nbytes[unit]
        for unit in self.left:
            grown -= nbytes[unit]
        return grown


class Room:
    """What a step took on the device, and what it would take if the device updated other units.

    `UnitOnDevice.waits` adds gradients that wait there for host updates: from the reduction of their unit to its next
    forward, which waits for the update. All together have a limit. Gradients that waited in the measured step
    (`Taken.waited`) do not count, because how many did depends on how fast the host was.
    """

    def __init__(self, parts: Sequence[Taken], units: Sequence[UnitOnDevice]) -> None:
        self._units = units
        self._parts = list[tuple[int, Changes, Changes, list[int]]]()
        before, updated, may_wait = Taken(0), frozenset[int](), sum(unit.waits for unit in units)
        for part in parts:  # each with the units reduced, those that wait, and those reduced for the first time
            reduced = Changes.between(before.reduced, part.reduced)
            waiting = Changes.between(before.reduced | before.coming, part.reduced | part.coming)
            nbytes = part.nbytes - min(part.waited, may_wait)
            self._parts.append((nbytes, reduced, waiting, sorted(part.reduced - updated)))
            before, updated = part, updated | part.reduced

    def needed_bytes(self, on_device: Collection[int]) -> int:
        """The most bytes on the device in such a step, if these units were updated there.

        >>> units = [UnitOnDevice(state=100, gradient=10, waits=10)] * 4
        >>> parts = [Taken(5, coming=frozenset([1])), Taken(500), Taken(480, frozenset(range(4)))]
        >>> room = Room(parts, units)
        >>> room.needed_bytes([0, 1]), room.needed_bytes([])
        (720, 500)
        >>> one = UnitOnDevice(state=100, gradient=0, state_now=100, made_now=60)
        >>> Room([Taken(500), Taken(400, frozenset([0])), Taken(510, frozenset([0]))], [one]).needed_bytes([0])
        560
        >>> room = Room([Taken(500), Taken(480, frozenset(range(4)), waited=15)], units)
        >>> room.needed_bytes([]), room.needed_bytes([0, 1])  # 20 may wait, of all or of the others
        (500, 705)
        """
        states, gradients, waits = 0, list[int](), list[int]()
        for number, unit in enumerate(self._units):
            stays = number in on_device and unit.may_stay
            # no less than would wait: where a set of units fits, each part of it must
            states += max(unit.state, unit.waits) * stays - unit.state_now
            gradients.append(unit.gradient * stays - unit.gradient_now)
            waits.append(unit.waits * (not stays))
        made = [unit.made_now for unit in self._units]
        unmade = sum(made)  # bytes of `state_now` that a part was measured without
        limit, most, reduced_bytes, waiting_now = waiting_bytes(waits), 0, 0, 0
        for nbytes, reduced, waiting, first in self._parts:
            reduced_bytes += reduced.of(gradients)
            waiting_now += waiting.of(waits)
            most = max(most, nbytes + states + unmade + reduced_bytes + min(waiting_now, limit))
            for number in first:
                unmade -= made[number]
        return most
