"""Times the first forwards and backwards for prefetch="auto": how long all-gathers and the compute between them take.

While it times, nothing is prefetched: the end of an all-gather that overlaps compute is noticed only when its unit is
needed. On CUDA the host waits for the device whenever the clock is read; after a few steps it is read no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from onefold.cost.prefetch import choose

TIMED_PASSES = 3  # forwards, and backwards, before prefetch is chosen
LOG = logging.getLogger("onefold")


def device_clock() -> float:
    """Seconds, once the device has done all that was enqueued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class GatherTimer:
    """Chooses the number of prefetched units once for forward and once for backward, after timing a few of each."""

    def __init__(
        self, unit_bytes: Sequence[int], live_bytes: int | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._bytes, self._live_bytes, self._clock = unit_bytes, live_bytes, clock
        self._started: dict[int, float] = {}
        self._gather_s: dict[int, float] = {}  # in this forward or backward
        self._compute_s: dict[int, float] = {}
        # All-gathers by purpose and unit: the shortest, since peers may be late.
        self._shortest_s: dict[tuple[str, int], float] = {}
        self._order: list[int] = []
        self._since = 0.0
        self._passes: dict[str, int] = {}

    def has_decided(self, purpose: str) -> bool:
        """Whether enough passes of this kind have been timed."""
        return self._passes.get(purpose, 0) >= TIMED_PASSES

    def started(self, index: int) -> None:
        self._started[index] = self._clock()

    def needed(self, index: int) -> None:
        now = self._clock()
        if self._order:
            self._compute_s[self._order[-1]] = self._compute_s.get(self._order[-1], 0.0) + now - self._since
        if index not in self._order:
            self._order.append(index)

    def arrived(self, index: int) -> None:
        self._since = self._clock()
        if index in self._started:
            self._gather_s[index] = self._since - self._started.pop(index)

    def end_of_pass(self, purpose: str) -> int | None:
        """Ends a forward or backward; the number of units to prefetch from now on, once enough have been timed."""
        order, compute = self._order, self._compute_s
        for index in order:
            seen = self._gather_s.get(index, 0.0)
            self._shortest_s[purpose, index] = min(seen, self._shortest_s.get((purpose, index), seen))
        self._order, self._gather_s, self._compute_s = [], {}, {}
        self._passes[purpose] = self._passes.get(purpose, 0) + 1
        if self._passes[purpose] != TIMED_PASSES or not order:
            return None
        gather_s = [self._shortest_s[purpose, index] for index in order]
        compute_s = [compute.get(index, 0.0) for index in order]
        chosen = choose(gather_s, compute_s, [self._bytes[index] for index in order], self._live_bytes)
        if chosen.bandwidth_bound:
            LOG.warning(
                "%s: gathering takes %.1f ms and computing %.1f ms, so the link is the limit; prefetch stays at %d, as "
                "more would hide nothing. A larger batch, keep_whole or stage 2 would help.",
                purpose, 1e3 * sum(gather_s), 1e3 * sum(compute_s), chosen.units,
            )  # fmt: skip
        elif chosen.memory_bound:
            LOG.warning("%s: prefetch stays at %d units, all that live_bytes leaves room for", purpose, chosen.units)
        return chosen.units
