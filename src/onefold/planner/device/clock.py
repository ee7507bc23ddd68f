"""Times work on a device: repeated until the clock is exact enough, by events on CUDA."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

HEAT_S = 2.0  # of products before the first timing, after which a GPU's clock is that of training


@dataclass(frozen=True)
class Clock:
    """Seconds of work on one device. A timing runs for `least_s` at least; `quick` ones run for an instant, on few
    sizes, to see that all parts work."""

    device: torch.device
    least_s: float = 0.01
    quick: bool = False

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one run: the least of several timings. One run warms up; the next decides how many runs a timing has."""
        work()
        once = self.mean_s(work, 1)
        if once >= self.least_s:
            return min(once, self.mean_s(work, 1))
        times = max(2, min(1000, int(self.least_s / max(once, 1e-7))))
        return min(self.mean_s(work, times) for _ in range(1 if self.quick else 2))

    def mean_s(self, work: Callable[[], object], times: int) -> float:
        """The mean of so many runs, one right after the other."""
        if not self.cuda:
            began = self._now()
            for _ in range(times):
                work()
            return (self._now() - began) / times
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        first.record()
        for _ in range(times):
            work()
        last.record()
        torch.cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) / 1e3 / times

    def host_s(self, work: Callable[[], object]) -> float:
        """Of one run as the host sees it: wall time with a GPU, else as `mean_s` counts."""
        return self.wall_s(work) if self.cuda else self.mean_s(work, 1)

    def _now(self) -> float:
        """A clock for a CPU. Where one thread computes, it is the CPU time of this process, so that time in which other
        programs had the core is not counted."""
        return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def wall_s(self, work: Callable[[], object]) -> float:
        """Of one run as the host sees it, with the wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        work()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def heat(self, least_s: float = HEAT_S) -> None:
        """Computes until a GPU has the clock and the temperature that it has in training."""
        if not self.cuda or self.quick:
            return
        left, right = (torch.randn(8192, 8192, device=self.device).bfloat16() for _ in range(2))
        began = time.perf_counter()
        while time.perf_counter() - began < least_s:
            for _ in range(20):
                left @ right
            torch.cuda.synchronize(self.device)

    def fits(self, nbytes: float) -> bool:
        """Whether so many bytes may be taken: at most half of the device's free memory, or an eighth of the host's."""
        if self.cuda:
            torch.cuda.empty_cache()
            return nbytes <= 0.5 * torch.cuda.mem_get_info(self.device)[0]
        return nbytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 8
