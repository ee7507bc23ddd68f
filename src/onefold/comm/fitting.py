"""Which free buffer of a pool serves a request. Integers only: the pool and the planner's formulas both ask here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fit(NamedTuple):
    """What becomes of the free buffers."""

    place: int | None  # of the buffer that leaves the free ones; None: there is none
    large_enough: bool  # whether it serves the request, or is freed for a larger one


def fit(free_bytes: Sequence[int], wanted_bytes: int) -> Fit:
    """The smallest free buffer that is large enough; else the largest, which is freed before a larger one is made.

    >>> fit([64, 32, 16], 20), fit([64, 32], 100), fit([], 5)
    (Fit(place=1, large_enough=True), Fit(place=0, large_enough=False), Fit(place=None, large_enough=False))
    """
    if not free_bytes:
        return Fit(None, False)
    enough = [index for index, size in enumerate(free_bytes) if size >= wanted_bytes]
    if enough:
        return Fit(min(enough, key=free_bytes.__getitem__), True)
    return Fit(max(range(len(free_bytes)), key=free_bytes.__getitem__), False)
