"""How many units to prefetch, from measured times. Numbers only.

An all-gather of T seconds is hidden if it starts so many units early that their compute takes at least T. Prefetching
more hides nothing: where all-gathers take longer than compute overall, the link is the limit, and the difference stays
exposed however many units are prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PrefetchChoice(NamedTuple):
    """How many units to prefetch, and what limits that number."""

    units: int
    bandwidth_bound: bool  # all-gathers take longer than compute; more prefetch would not help
    memory_bound: bool  # a larger number would help, but does not fit into memory


def choose(
    gather_s: Sequence[float], compute_s: Sequence[float], unit_bytes: Sequence[int], budget_bytes: int | None = None
) -> PrefetchChoice:
    """The smallest number of prefetched units that hides every all-gather behind the compute of the units before.

    `gather_s[i]`, `compute_s[i]` and `unit_bytes[i]` are of the i-th unit of the pass.

    >>> choose([0.008] * 32, [0.010] * 32, [1] * 32).units
    1
    >>> choose([0.016] * 32, [0.010] * 32, [1] * 32)
    PrefetchChoice(units=1, bandwidth_bound=True, memory_bound=False)
    """
    count = len(gather_s)
    if sum(gather_s) > sum(compute_s):
        return PrefetchChoice(min(1, max(count - 1, 0)), bandwidth_bound=True, memory_bound=False)
    wanted = max((_early(gather_s[i], compute_s[:i]) for i in range(1, count)), default=0)
    fitting = wanted
    while fitting > 1 and budget_bytes is not None and _most_live(unit_bytes, fitting) > budget_bytes:
        fitting -= 1
    return PrefetchChoice(fitting, bandwidth_bound=False, memory_bound=fitting < wanted)


def _early(gather_s: float, before_s: Sequence[float]) -> int:
    """How many units before its own an all-gather must start to be hidden."""
    hidden, units = 0.0, 0
    for compute_s in reversed(before_s):
        units += 1
        hidden += compute_s
        if hidden >= gather_s:
            break
    return units


def _most_live(unit_bytes: Sequence[int], units: int) -> int:
    """The most bytes of unsharded parameters when one unit computes and `units` more are prefetched."""
    return max(sum(unit_bytes[i : i + 1 + units]) for i in range(len(unit_bytes)))


def exposed_s(gather_s: Sequence[float], compute_s: Sequence[float], units: int, slowed: float = 1.0) -> float:
    """Seconds that all-gathers add to a forward or backward. They run one after the other on one link, and each starts
    `units` ahead of its need; while one runs, compute takes `slowed` times as long."""
    started_at = [0.0] * len(gather_s)
    link_free = clock = 0.0
    arrives: list[float] = []
    for i, compute in enumerate(compute_s):
        for j in range(len(arrives), min(i + 1 + units, len(gather_s))):
            started_at[j] = max(link_free, clock)
            link_free = started_at[j] + gather_s[j]
            arrives.append(link_free)
        clock = computed(max(clock, arrives[i]), compute, link_free, slowed)
    return clock - sum(compute_s)


def computed(clock: float, compute: float, link_free: float, slowed: float) -> float:
    """The time at which `compute` seconds of work end. They begin at `clock`, and until the link is free they take
    `slowed` times as long.

    >>> [computed(10.0, 4.0, link_free, 1.25) for link_free in (0.0, 12.5, 99.0)]
    [14.0, 14.5, 15.0]
    """
    beside = min(slowed * compute, max(0.0, link_free - clock))
    return clock + beside + compute - beside / slowed
