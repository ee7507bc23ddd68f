"""Live bytes by category, from every tensor operation, and their breakdown at the peak."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from onefold.runtime.live_bytes import LiveBytes

CLOSE = 0.002  # the breakdown is of an instant with at most so much less than the peak
CATEGORIES = ("parameters", "gradients", "optimizer", "buffers", "communication", "checkpoints", "activations")


class Tracker(LiveBytes):
    """Live bytes of every storage that tensor operations make while this mode is on, and their breakdown at the peak.

    `known` gives the category of a storage; all others are activations (and temporaries). Storages in `elsewhere` are
    not on the device, and are not counted.
    """

    def __init__(
        self, known: Callable[[], dict[int, tuple[str, Tensor]]], elsewhere: Container[int] = frozenset()
    ) -> None:
        super().__init__(elsewhere)
        self._known = known
        self._fullest: dict[int, int] = {}  # serial -> bytes, at the peak or shortly before
        self._fullest_bytes = 0
        self._category: dict[int, str] = {}  # serial -> category

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._classify()

    def _grown(self) -> None:
        if self.peak_bytes > self._fullest_bytes * (1 + CLOSE):  # a breakdown is slow: not for every byte
            self._fullest_bytes = self.peak_bytes
            self._classify()
            self._fullest = {serial: size for _, serial, size in self._live.values()}

    def _classify(self) -> None:
        for key, (category, _) in self._known().items():
            if key in self._live:
                self._category[self._live[key][1]] = category

    def peak(self) -> dict[str, int]:
        """Bytes by category at the peak; bytes after the last breakdown count as activations."""
        sums = dict.fromkeys(CATEGORIES, 0)
        for serial, nbytes in self._fullest.items():
            sums[self._category.get(serial, "activations")] += nbytes
        sums["activations"] += self.peak_bytes - sum(sums.values())
        return sums
