"""Seconds of a model's forward, from the first step, which plans what later steps do.

The first forward of a run takes longer than later ones: blocks are compiled and libraries are loaded. So of units that
are alike the median counts, if units are unsharded for forward; else the shortest forward of the step. Parameters that
come from host memory in this step are waited for here too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Any

import torch


class ForwardTime:
    """Of the training forwards of one step, on one device. Only forwards that end count."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._runs: list[tuple[list[Any], list[int]]] = []  # of each forward: when units began and it ended; elements
        self._times: list[Any] = []
        self._numels: list[int] = []
        self._known = set[int]()
        self._running = False

    @property
    def forwards(self) -> int:
        return len(self._runs)

    def begin(self) -> None:
        """A forward of the model begins."""
        self._times, self._numels, self._known, self._running = [self._now()], [0], set(), True

    def begin_units(self, units: Mapping[int, int]) -> None:
        """Units begin together: the elements of each, by number. Only the first time of a unit counts."""
        new = units.keys() - self._known
        if self._running and new:
            self._known |= new
            self._times.append(self._now())
            self._numels.append(sum(units[number] for number in new))

    def end(self) -> None:
        """The forward has ended."""
        if self._running:
            self._runs.append(([*self._times, self._now()], self._numels))
            self._running = False

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # the host runs ahead of the device
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> float:
        """Of a later forward; 0 if none has ended. Called once the device has run them."""
        return min((typical_s(self._took(times), numels) for times, numels in self._runs), default=0.0)

    def _took(self, times: Sequence[Any]) -> list[float]:
        return [a.elapsed_time(b) / 1000 if self._cuda else b - a for a, b in pairwise(times)]


def typical_s(seconds: Sequence[float], numels: Sequence[int]) -> float:
    """Seconds of a forward in which parts took `seconds` that have so many elements. Where several have equally many,
    each of them takes their median, and no other part takes longer by element than they do.

    >>> seconds = [0.2, 0.1, 7.0, 1.0, 1.2, 1.0, 9.0]  # before all units, an embedding, four blocks, a head
    >>> round(typical_s(seconds, [0, 5, 20, 20, 20, 20, 10]), 3)
    4.6
    >>> typical_s([0.0, 1.0, 2.0], [0, 4, 8]), typical_s([3.0], [0])
    (3.0, 3.0)
    """
    by_size: dict[int, list[float]] = {}
    for took, numel in zip(seconds, numels, strict=True):
        by_size.setdefault(numel, []).append(took)
    medians = {numel: median_low(of_size) for numel, of_size in by_size.items() if numel and len(of_size) > 1}
    if not medians:
        return sum(seconds)
    counted = [numel for numel in numels if numel in medians]
    per_element = sum(medians[numel] for numel in counted) / sum(counted)
    return sum(
        medians[numel] if numel in medians else min(took, per_element * numel)
        for took, numel in zip(seconds, numels, strict=True)
    )
