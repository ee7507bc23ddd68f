"""How many units keep their optimizer state on the device, given the memory that parts of a step took there."""

from __future__ import annotations

from collections.abc import Sequence
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


def needed_bytes(parts: Sequence[Taken], units: Sequence[UnitOnDevice], count: int) -> int:
    """The most bytes on the device in such a step, if the first `count` units were updated there."""
    stays = [number < count and unit.may_stay for number, unit in enumerate(units)]
    states = sum(unit.state * stay - unit.state_now for unit, stay in zip(units, stays, strict=True))
    gradients = [unit.gradient * stay - unit.gradient_now for unit, stay in zip(units, stays, strict=True)]
    found = [part.nbytes + states + sum(gradients[number] for number in part.reduced) for part in parts]
    return max(found, default=0)


def most_that_fit(parts: Sequence[Taken], units: Sequence[UnitOnDevice], room: int) -> int:
    """How many units, the first of forward, the device may update within `room` bytes; 0 also if none fits.

    >>> units = [UnitOnDevice(state=100, gradient=10)] * 4
    >>> forward, backward = Taken(500), Taken(200, frozenset(range(4)))
    >>> most_that_fit([forward, backward], units, room=720)
    2
    """
    fitting = [count for count in range(len(units) + 1) if needed_bytes(parts, units, count) <= room]
    return max(fitting, default=0)
