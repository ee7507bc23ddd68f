"""Seconds: how many units to prefetch, when stage 3 pays, and how long a step takes. Numbers only.

All-gathers overlap with the compute of the units before, reductions with the rest of backward; the last reduction has
nothing left to overlap with. What does not fit there is exposed. The all-gathers after the update (stages 1 and 2) are
waited for; each starts once its own unit is updated, while later units are still reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.prefetch import computed, exposed_s


class PrefetchNeed(NamedTuple):
    """How many units to prefetch, and what that cannot hide."""

    units: int
    bandwidth_bound: bool  # all-gathers take longer than compute overall: no prefetch hides the difference
    exposed_s: float


def prefetch_need(gather_s: Sequence[float], compute_s: Sequence[float]) -> PrefetchNeed:
    """The smallest number of units whose compute takes at least as long as any all-gather that it hides.

    >>> prefetch_need([0.008] * 32, [0.010] * 32).units
    1
    >>> bound = prefetch_need([0.016] * 32, [0.010] * 32)
    >>> bound.units, bound.bandwidth_bound, round(bound.exposed_s + 0.320, 3)
    (2, True, 0.522)
    """
    most = max((_units_for(gather, compute_s[:i][::-1]) for i, gather in enumerate(gather_s) if i), default=0)
    bound = sum(gather_s) > sum(compute_s)
    return PrefetchNeed(most, bound, exposed_s(gather_s, compute_s, max(most, 1)))


def _units_for(gather: float, before: Sequence[float]) -> int:
    hidden = 0.0
    for units, compute in enumerate(before, 1):
        hidden += compute
        if hidden >= gather:
            return units
    return len(before)


def prefetch_for_equal_units(gather_s: float, compute_s: float) -> int:
    """`prefetch_need` for equal units: ceil(gather / compute).

    >>> [prefetch_for_equal_units(200e6 * 2 / rate, 0.010) for rate in (25e9, 50e9, 100e9, 200e9)]
    [2, 1, 1, 1]
    """
    return max(1, math.ceil(round(gather_s / compute_s, 9)))


def stage3_communication_s(numel: float, layers: int, latency_s: float, rate: float, itemsize: int = 2) -> float:
    """Seconds of two all-gathers and a reduce-scatter of all parameters, one after the other, nothing hidden.

    >>> round(stage3_communication_s(7e9, 32, 10e-6, 100e9), 3)
    0.421
    """
    return 3 * layers * latency_s + 3 * itemsize * numel / rate


def compute_step_s(numel: float, batch: int, seq: int, flops: float) -> float:
    """Seconds of compute in a step, at 6 flops per parameter and token."""
    return 6 * numel * batch * seq / flops


def break_even_batch(
    numel: float, layers: int, seq: int, flops: float, latency_s: float, rate: float, overhead: float = 0.05
) -> int:
    """The smallest batch at which stage 3's communication, hidden or not, is below `overhead` of its compute.

    It does not depend on the number of parameters, but for the latency.

    >>> [break_even_batch(size, 32, 2048, 150e12, 10e-6, 100e9) for size in (7e9, 70e9)]
    [15, 15]
    """
    communication = stage3_communication_s(numel, layers, latency_s, rate)
    return max(1, math.ceil(communication / overhead / compute_step_s(numel, 1, seq, flops)))


class StepSeconds(NamedTuple):
    """Seconds of one step of one rank."""

    compute: float
    exposed: float  # waiting for all-gathers and reductions that compute does not hide
    tensor: float  # tensor-parallel all-reduces and attention over cut sequences, which nothing hides
    update: float
    transfer: float  # between device, host and disk, as far as compute does not hide it
    bubble: float  # pipeline stages waiting for each other

    @property
    def total(self) -> float:
        return sum(self)


def exposed_in_step(
    compute_s: float,
    *,
    unit_numel: Sequence[int],
    gather_s: Sequence[float],
    reduce_s: float,
    updated_s: float,
    prefetch: int,
    reshard_after_forward: bool = True,
    checkpointed: bool,
    micro_batches: int,
    rounds: int,
    at_once: float | None = None,
    slowed: float = 1.0,
) -> float:
    """Seconds that messages add to a step, over all micro-batches: waits for them, and compute that they slow.

    `compute_s` is of one micro-batch, of which each unit has a share by its elements (`unit_numel`); `gather_s` of each
    unit that a pass gathers, empty if none is sharded; `reduce_s` of one reduction of all units, of which there are
    `rounds` in a step; `updated_s` of what is gathered after the update. `at_once` and `slowed` as of
    `exposed_in_backward`.
    """
    shares = (1, 3) if checkpointed else (1, 2)
    forward, backward = (compute_s * share / sum(shares) for share in shares)
    elements = sum(unit_numel) or 1
    units = [numel / elements for numel in unit_numel]
    computing = [backward * share for share in reversed(units)]
    again = gather_s[::-1] if gather_s and reshard_after_forward else [0.0] * len(units)
    reducing, updated = ([seconds * share for share in reversed(units)] for seconds in (reduce_s, updated_s))
    waiting = exposed_in_backward(again, reducing, computing, prefetch, at_once, updated, slowed)
    if rounds > 1:
        waiting += (rounds - 1) * exposed_in_backward(again, reducing, computing, prefetch, at_once, slowed=slowed)
    if gather_s:
        waiting += micro_batches * exposed_s(gather_s, [forward * share for share in units], prefetch, slowed)
        waiting += max(0, micro_batches - rounds) * exposed_s(again, computing, prefetch, slowed)
    return waiting


def exposed_in_backward(
    gather_s: Sequence[float],
    reduce_s: Sequence[float],
    compute_s: Sequence[float],
    prefetch: int,
    at_once: float | None = None,
    updated_s: Sequence[float] = (),
    slowed: float = 1.0,
) -> float:
    """Seconds that a backward and the update wait for messages, unit by unit in backward's order: all-gathers start
    `prefetch` units ahead, reductions as soon as their unit has computed, and the last one is waited for. After
    backward each unit is updated when it is reduced, and is then gathered (`updated_s`) while others are still reduced.
    Both kinds follow each other over one link. If both take `at_once` times as long at the same time as alone, their
    link is less of a limit: at 1 each kind has a link of its own, at 2 they share one. While messages are in flight
    compute takes `slowed` times as long, which counts as waiting.

    >>> exposed_in_backward([0.0] * 4, [1.0] * 4, [2.0] * 4, 1)  # only the last is not hidden
    1.0
    >>> exposed_in_backward([0.0] * 4, [3.0] * 4, [2.0] * 4, 1)
    6.0
    >>> both = [3.0] * 2, [3.0] * 2, [1.0] * 2, 1
    >>> exposed_in_backward(*both), exposed_in_backward(*both, at_once=1.5), exposed_in_backward(*both, at_once=1.0)
    (10.0, 9.0, 8.0)
    >>> stage2 = [0.0] * 4, [3.0] * 4, [1.0] * 4, 1
    >>> [exposed_in_backward(*stage2, at_once=ratio, updated_s=[3.0] * 4) for ratio in (2.0, 1.0)]
    [21.0, 12.0]
    """
    over_one, apart = (
        _exposed_over(gather_s, reduce_s, compute_s, prefetch, updated_s, slowed, one_link=one_link)
        for one_link in (True, False)
    )
    share = 1.0 if at_once is None else min(1.0, at_once - 1)
    return share * over_one + (1 - share) * apart


def _exposed_over(
    gather_s: Sequence[float],
    reduce_s: Sequence[float],
    compute_s: Sequence[float],
    prefetch: int,
    updated_s: Sequence[float],
    slowed: float,
    *,
    one_link: bool,
) -> float:
    gather_free = reduce_free = clock = 0.0
    arrives: list[float] = []
    reduced: list[float] = []
    for i, (reducing, compute) in enumerate(zip(reduce_s, compute_s, strict=True)):
        for ahead in gather_s[len(arrives) : i + 1 + prefetch]:
            if ahead:
                gather_free = max(gather_free, clock) + ahead
                reduce_free = gather_free if one_link else reduce_free
            arrives.append(gather_free if ahead else clock)
        clock = computed(max(clock, arrives[i]), compute, max(gather_free, reduce_free), slowed)
        if reducing:
            reduce_free = max(reduce_free, clock) + reducing
            gather_free = reduce_free if one_link else gather_free
        reduced.append(reduce_free if reducing else clock)
    for done, gathering in zip(reduced, updated_s):
        gather_free = max(gather_free, done, clock) + gathering
    return max(clock, gather_free, reduce_free) - sum(compute_s)
