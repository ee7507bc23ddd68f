"""Orders of units that were seen in one step, completed by the units that were not used in it.

All-gathers and reductions of a backward must come in orders that fit together: a unit is reduced after the all-gathers
that its gradients need. Otherwise a rank may wait for a reduction that a peer cannot start before an all-gather for
which that peer waits. So a unit that was not seen gets the place that the order of registration suggests in both.
"""

from __future__ import annotations

from collections.abc import Sequence


def with_missing(order: list[int], everything: Sequence[int]) -> list[int]:
    """`order`, and what it lacks of `everything`: each before the one that follows it there, or else after the nearest
    one before it.

    >>> with_missing([0, 2, 3, 1], range(5))
    [0, 2, 3, 4, 1]
    """
    result = list(order)
    for at in reversed(range(len(everything))):
        if everything[at] in result:
            continue
        if at + 1 < len(everything):
            place = result.index(everything[at + 1])
        else:
            before = (result.index(other) + 1 for other in reversed(everything) if other in result)
            place = next(before, len(result))
        result.insert(place, everything[at])
    return result
