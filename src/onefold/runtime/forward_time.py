"""Seconds of a forward, from when its units begin, for a step that plans by them.

The first forward of a run takes longer than later ones: blocks are compiled, libraries are loaded, and the backward
behind it waits for host updates whose memory is touched for the first time. Of units that are alike, the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch


class ForwardTime:
    """Of one forward, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._begins: list[Any] = []  # events on CUDA, whose host runs ahead; else seconds
        self._numels: list[int] = []
        self._known = set[int]()

    def begin(self, units: Mapping[int, int]) -> None:
        """Units begin together: the elements of each, by number. Those that have begun before do not count."""
        new = units.keys() - self._known
        if not new:
            return
        self._known |= new
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._begins.append(event)
        else:
            self._begins.append(time.perf_counter())
        self._numels.append(sum(units[number] for number in new))

    def seconds(self) -> float:
        """Of a later forward, as far as is known; 0 if nothing is. The device has run this one."""
        pairs = list(zip(self._begins, self._begins[1:], strict=False))
        took = [a.elapsed_time(b) / 1000 if self._cuda else b - a for a, b in pairs]
        return typical_s(took, self._numels)


def typical_s(seconds: Sequence[float], numels: Sequence[int]) -> float:
    """Seconds of all units; how long the last took is not known. Each of several units of one size takes their median,
    and other units as long by element. Where no two units are alike, what they took counts.

    >>> round(typical_s([0.1, 7.0, 1.0, 1.2, 1.0], [5, 20, 20, 20, 20, 10]), 3)  # an embedding, four blocks, a head
    5.225
    >>> typical_s([1.0, 2.0], [4, 8, 4])
    4.0
    >>> typical_s([], [4])
    0.0
    """
    by_size: dict[int, list[float]] = {}
    for took, numel in zip(seconds, numels, strict=False):
        by_size.setdefault(numel, []).append(took)
    alike = {numel: median(of_size) for numel, of_size in by_size.items() if numel and len(of_size) > 1}
    if not alike:
        known = sum(numels[: len(seconds)])
        return sum(seconds) * sum(numels) / known if known else 0.0
    counts = {numel: len(by_size[numel]) for numel in alike}
    per_element = sum(alike[numel] * n for numel, n in counts.items()) / sum(numel * n for numel, n in counts.items())
    return sum(alike.get(numel, per_element * numel) for numel in numels)
