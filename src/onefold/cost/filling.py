"""Bytes that a step would take on the device if other units kept their state there, from what its parts took."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from onefold.cost.limits import waiting_bytes

FILLED = 0.95  # of a device's memory


class Taken(NamedTuple):
    """The most bytes on the device in one part of a step."""

    nbytes: int
    reduced: frozenset[int] = frozenset()  # trained units, by number, whose gradients were complete before it ended
    coming: frozenset[int] = frozenset()  # trained units, by number, whose forward had not begun before it did


class UnitOnDevice(NamedTuple):
    """What one trained unit takes on the device if the device updates it."""

    state: int  # bytes of master and optimizer state
    gradient: int  # bytes of its gradient, from its reduction to step()
    state_now: int = 0  # bytes that it has there now
    gradient_now: int = 0  # bytes of its gradient there, from its reduction to step()
    made_now: int = 0  # bytes of `state_now` that this step made, in an update right after the reduction
    may_stay: bool = True
    waits: int = 0  # bytes of its gradient that a step would have there, waiting for the host, if the host updates it


def with_blocks(parts: Sequence[Taken], blocks: Sequence[frozenset[int]], nbytes: int) -> list[Taken]:
    """The parts of a step, if these blocks, each with the numbers of its trained units, kept `nbytes` more from their
    forward until their gradients are complete.

    >>> one, both = frozenset([1]), frozenset([0, 1])
    >>> parts = with_blocks([Taken(8, coming=one), Taken(9), Taken(5, one), Taken(3, both)], [one], 10)
    >>> [part.nbytes for part in parts]
    [8, 19, 15, 3]
    """
    found, before = [], frozenset[int]()
    for part in parts:
        there = sum(not units or not (units <= before or units <= part.coming) for units in blocks)
        found.append(part._replace(nbytes=part.nbytes + there * nbytes))
        before = part.reduced
    return found


class Room:
    """What a step took on the device, and what it would take if the device updated other units.

    Gradients that wait for host updates are not among what it took. In backward those wait whose reduction has ended,
    up to a limit; and from the step before those of units whose forward, which waits for the update, has not begun.
    """

    def __init__(self, parts: Sequence[Taken], units: Sequence[UnitOnDevice]) -> None:
        self._units = units
        self._coming = parts[0].coming if parts else frozenset[int]()  # in the first part
        self._parts = list[tuple[int, list[int], list[int]]]()
        before = Taken(0, coming=self._coming)
        for part in parts:  # each with the units whose gradients were not complete, and whose forward was, in it only
            reduced, begun = part.reduced - before.reduced, before.coming - part.coming
            self._parts.append((part.nbytes, sorted(reduced), sorted(begun)))
            before = part

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
        """
        states, unmade = 0, 0  # bytes, the latter of what was not there yet in a part of the step
        gradients, waits = list[int](), list[int]()
        for number, unit in enumerate(self._units):
            stays = number in on_device and unit.may_stay
            states += unit.state * stays - unit.state_now
            gradients.append(unit.gradient * stays - unit.gradient_now)
            waits.append(unit.waits * (not stays))
            unmade += unit.made_now
        limit, waiting = waiting_bytes(waits), sum(waits[number] for number in self._coming)
        most = reduced = 0
        for nbytes, more, begun in self._parts:
            reduced += sum(gradients[number] for number in more)
            waiting += sum(waits[number] for number in more) - sum(waits[number] for number in begun)
            most = max(most, nbytes + states + unmade + reduced + min(waiting, limit))
            unmade -= sum(self._units[number].made_now for number in more)
        return most
