"""How much device memory a backward has freed since it began: what it may use again without raising the peak."""

from __future__ import annotations

import torch


class FreedMemory:
    """On CUDA, of torch's allocator; elsewhere, or without `counts`, nothing counts as freed."""

    def __init__(self, device: torch.device, *, counts: bool) -> None:
        self._device, self._counts = device, counts and device.type == "cuda"
        self._at_first = self._spare = 0

    def begin(self) -> None:
        """A backward begins: activations are at their most."""
        if self._counts:
            self._at_first, self._spare = self._allocated(), 0

    def holds(self, nbytes: int) -> bool:
        """Whether so many bytes fit into what has been freed since then; if so, they are taken to be used from now on.

        torch's allocator is asked only once what it had when it was last asked is used: it answers with all that it
        counts, and backward goes on to free memory."""
        if self._counts and nbytes > self._spare:
            self._spare = self._at_first - self._allocated()
        fits = self._counts and nbytes <= self._spare
        self._spare -= nbytes * fits
        return fits

    def _allocated(self) -> int:
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return int(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"])
