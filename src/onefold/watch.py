"""Times a few passes for prefetch="auto": how long gathers take, and the compute between needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from onefold.lookahead import choose
from onefold.unit import Unit

WATCHED_PASSES = 3  # of each kind, before it decides
LOG = logging.getLogger("onefold")


class Watch:
    """Decides once for forward and once for backward, when it has seen enough of each."""

    def __init__(self, units: Sequence[Unit], live_bytes: int | None) -> None:
        self._bytes = [unit.layout.numel * unit.layout.itemsize for unit in units]
        self._live_bytes = live_bytes
        self._started: dict[int, float] = {}
        self._gather_s: dict[int, float] = {}  # in this pass
        self._compute_s: dict[int, float] = {}
        self._shortest_s: dict[tuple[str, int], float] = {}  # gathers, by kind of pass: peers may be late
        self._order: list[int] = []
        self._since = 0.0
        self._passes: dict[str, int] = {}

    def started(self, index: int) -> None:
        self._started[index] = time.perf_counter()

    def needed(self, index: int) -> None:
        now = time.perf_counter()
        if self._order:
            self._compute_s[self._order[-1]] = self._compute_s.get(self._order[-1], 0.0) + now - self._since
        if index not in self._order:
            self._order.append(index)

    def arrived(self, index: int) -> None:
        self._since = time.perf_counter()
        if index in self._started:
            self._gather_s[index] = self._since - self._started.pop(index)

    def end_of_pass(self, purpose: str) -> int | None:
        """What to use from now on for this kind of pass, when enough has been seen."""
        order, compute = self._order, self._compute_s
        for index in order:
            seen = self._gather_s.get(index, 0.0)
            self._shortest_s[purpose, index] = min(seen, self._shortest_s.get((purpose, index), seen))
        self._order, self._gather_s, self._compute_s = [], {}, {}
        self._passes[purpose] = self._passes.get(purpose, 0) + 1
        if self._passes[purpose] != WATCHED_PASSES or not order:
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
