"""Bytes that a step would take on the device if other units kept their state there, from what its parts took."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

FILLED = 0.95  # of a device's memory


class Taken(NamedTuple):
    """The most bytes on the device in one part of a step."""

    nbytes: int
    reduced: frozenset[int] = frozenset()  # trained units, by number, whose gradients were complete before it ended


class UnitOnDevice(NamedTuple):
    """What one trained unit takes on the device if the device updates it."""

    state: int  # bytes of master and optimizer state
    gradient: int  # bytes of its gradient, from its reduction to step()
    state_now: int = 0  # bytes that it had on the device throughout the step
    gradient_now: int = 0  # bytes of its gradient there, from its reduction to step()
    may_stay: bool = True


def with_blocks(parts: Sequence[Taken], blocks: Sequence[frozenset[int]], nbytes: int) -> list[Taken]:
    """The parts of a step, if these blocks, each with the numbers of its trained units, kept `nbytes` more until their
    gradients are complete.

    >>> with_blocks([Taken(9), Taken(5, frozenset([1])), Taken(3, frozenset([0, 1]))], [frozenset([1])], 10)[1:]
    [Taken(nbytes=15, reduced=frozenset({1})), Taken(nbytes=3, reduced=frozenset({0, 1}))]
    """
    found, before = [], frozenset[int]()
    for part in parts:
        there = sum(not units or not units <= before for units in blocks)
        found.append(part._replace(nbytes=part.nbytes + there * nbytes))
        before = part.reduced
    return found


class Room:
    """What a step took on the device, and what it would take if the device updated other units."""

    def __init__(self, parts: Sequence[Taken], units: Sequence[UnitOnDevice]) -> None:
        self._units, self._parts = units, list[tuple[int, list[int]]]()
        seen: frozenset[int] = frozenset()
        for part in parts:  # each with the units whose gradients were not complete in the one before
            self._parts.append((part.nbytes, sorted(part.reduced - seen)))
            seen |= part.reduced

    def needed_bytes(self, on_device: Collection[int]) -> int:
        """The most bytes on the device in such a step, if these units were updated there.

        >>> units = [UnitOnDevice(state=100, gradient=10)] * 4
        >>> room = Room([Taken(500), Taken(200, frozenset(range(4)))], units)
        >>> room.needed_bytes([0, 1]), room.needed_bytes([])
        (700, 500)
        """
        states, gradients = 0, list[int]()
        for number, unit in enumerate(self._units):
            stays = number in on_device and unit.may_stay
            states += unit.state * stays - unit.state_now
            gradients.append(unit.gradient * stays - unit.gradient_now)
        most = reduced = 0
        for nbytes, more in self._parts:
            reduced += sum(gradients[number] for number in more)
            most = max(most, nbytes + states + reduced)
        return most
