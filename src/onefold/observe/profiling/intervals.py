"""Which of several things fills each instant of a stretch of time. Nanoseconds in, nanoseconds out; no torch, no files.

Things overlap: a wait lies inside a backward, a kernel runs beside a copy. Each instant is counted once: inside one
thread for the innermost thing that has a label, between layers for the first layer that has something there. So what is
found always adds up to the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

L = TypeVar("L")


class Stretch(NamedTuple, Generic[L]):
    """From an instant up to another, without it."""

    start: int
    stop: int
    label: L


def innermost(events: Iterable[Stretch[str]], label: Callable[[str, L | None], L | None]) -> list[Stretch[L]]:
    """One thread's events, one inside the other, as neighbours: each instant with the label of the innermost event.

    `label` says it from an event's name and the label around it. An event that outlasts the one around it is cut there.
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
    """In order, each instant once: where two overlap, for the one that began first.

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
    """How much lies in at least one of them.

    >>> covered([Stretch(0, 4, "a"), Stretch(2, 6, "b"), Stretch(10, 11, "c")])
    7
    """
    return sum(one.stop - one.start for one in disjoint(stretches))


def shares(start: int, stop: int, layers: Sequence[Iterable[Stretch[L]]], rest: L) -> dict[L, int]:
    """How long each label has the whole from `start` to `stop`: earlier layers first, and what is left is `rest`'s.

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
    """What a layer has of the free time, and what it leaves. Both are in order."""
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
    """What is there, of neighbours in order."""
    place = bisect_right(stretches, instant, key=_start) - 1
    return stretches[place].label if place >= 0 and instant < stretches[place].stop else None


def _start(one: Stretch[Any]) -> int:
    return one.start
