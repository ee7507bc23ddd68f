"""Attributes each instant of an interval to one label. Integers of nanoseconds; no torch, no files.

Events overlap: a wait is inside a backward, a kernel runs beside a copy. Each instant is counted once: inside one
thread for the innermost event that has a label, between layers for the first layer that has an event there. So the
times of all labels always add up to the interval.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

L = TypeVar("L")


class Stretch(NamedTuple, Generic[L]):
    """A half-open interval of time with a label."""

    start: int
    stop: int
    label: L


def innermost(events: Iterable[Stretch[str]], label: Callable[[str, L | None], L | None]) -> list[Stretch[L]]:
    """One thread's nested events as adjacent intervals: each instant has the label of the innermost event.

    `label` makes an event's label from its name and the label around it. An event that outlasts the one around it is
    cut at its end.
    """
    found: list[Stretch[L]] = []
    open_: list[tuple[int, L | None]] = []  # stop and label, the innermost last
    at = 0

    def until(instant: int) -> None:
        nonlocal at
        if open_ and (now := open_[-1][1]) is not None and at < instant:
            found.append(Stretch(at, instant, now))
        at = max(at, instant)

    def close(instant: float) -> None:
        while open_ and open_[-1][0] <= instant:
            until(open_[-1][0])
            open_.pop()

    for start, stop, name in sorted(events, key=lambda event: (event.start, -event.stop)):
        close(start)
        until(start)
        outer_stop, outer = open_[-1] if open_ else (stop, None)
        open_.append((min(stop, outer_stop), label(name, outer)))
    close(float("inf"))
    return found


def disjoint(stretches: Iterable[Stretch[L]]) -> list[Stretch[L]]:
    """The intervals in order without overlap: an instant in two of them belongs to the one that began first.

    >>> disjoint([Stretch(0, 4, "a"), Stretch(2, 6, "b"), Stretch(3, 4, "c")])
    [Stretch(start=0, stop=4, label='a'), Stretch(start=4, stop=6, label='b')]
    """
    found: list[Stretch[L]] = []
    at = None
    for start, stop, label in sorted(stretches, key=lambda one: one[:2]):
        start = start if at is None else max(start, at)
        if start < stop:
            found.append(Stretch(start, stop, label))
            at = stop
    return found


def covered(stretches: Iterable[Stretch[L]]) -> int:
    """The time that is in at least one of the intervals.

    >>> covered([Stretch(0, 4, "a"), Stretch(2, 6, "b"), Stretch(10, 11, "c")])
    7
    """
    return sum(one.stop - one.start for one in disjoint(stretches))


def shares(start: int, stop: int, layers: Sequence[Iterable[Stretch[L]]], rest: L) -> dict[L, int]:
    """The time of each label from `start` to `stop`: earlier layers first; what no layer has belongs to `rest`.

    >>> shares(0, 10, [[Stretch(2, 5, "kernel")], [Stretch(4, 8, "copy")]], "idle")
    {'kernel': 3, 'copy': 3, 'idle': 4}
    """
    found: dict[L, int] = {}
    free = [(start, stop)] if start < stop else []
    for layer in layers:
        taken, free = _take(free, disjoint(layer))
        for one in taken:
            found[one.label] = found.get(one.label, 0) + one.stop - one.start
    left = sum(stop - start for start, stop in free)
    if left:
        found[rest] = found.get(rest, 0) + left
    return found


def _take(
    free: Sequence[tuple[int, int]], layer: Sequence[Stretch[L]]
) -> tuple[list[Stretch[L]], list[tuple[int, int]]]:
    """The intervals that a layer takes of the free time, and the free time that is left; both in order."""
    taken: list[Stretch[L]] = []
    left: list[tuple[int, int]] = []
    first = 0
    for start, stop in free:
        while first < len(layer) and layer[first].stop <= start:
            first += 1
        place = first
        while place < len(layer) and layer[place].start < stop:
            one = layer[place]
            if start < one.start:
                left.append((start, one.start))
            taken.append(Stretch(max(start, one.start), min(stop, one.stop), one.label))
            start = taken[-1].stop
            place += 1
        if start < stop:
            left.append((start, stop))
    return taken, left


def at(stretches: Sequence[Stretch[L]], instant: int) -> L | None:
    """The label at an instant, of intervals in order without overlap."""
    place = bisect_right(stretches, instant, key=_start) - 1
    return stretches[place].label if place >= 0 and instant < stretches[place].stop else None


def _start(one: Stretch[Any]) -> int:
    return one.start
