"""One stretch of memory for what lives long (M_D): block inputs, from forward to backward.

Among short-lived tensors each of them would pin a piece of the allocator's memory, and what lies between the pieces is
too small for the next large tensor. Here they lie side by side: forward adds one behind the other, backward takes them
away from the end. The stretch is as long as expected at first, and exactly as long as needed from the first quiet
moment on; what does not fit in the meantime gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FAR_OFF = 0.75  # a first guess that much too long is put right


class Slot:
    """A piece of an arena; it is free again when nobody holds it."""

    __slots__ = ("_arena", "_tensor", "nbytes", "start")

    def __init__(self, arena: Arena, start: int | None, tensor: Tensor) -> None:
        self._arena, self.start, self._tensor, self.nbytes = arena, start, tensor, tensor.numel()

    def view(self, dtype: torch.dtype) -> Tensor:
        return self._tensor.view(dtype)

    def __del__(self) -> None:
        self._arena._free(self)


class Arena:
    """`make` gives so many bytes as one uint8 tensor."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._stretch: Tensor | None = None
        self._taken: dict[int, int] = {}  # start -> stop, of slots in the stretch
        self._aside: dict[int, Tensor] = {}  # id of a slot -> memory of its own
        self._needed = 0  # the longest stretch that would have held all slots of a moment
        self._expected = 0
        self._settled = False  # a first round has shown what is needed

    def expect(self, nbytes: int) -> None:
        """How much a round will need, before there was one."""
        if not self._settled and not self._taken and not self._aside:
            self._expected = max(self._expected, nbytes)

    def take(self, nbytes: int) -> Slot:
        self._fit()
        start = self._place(nbytes)
        if self._stretch is None or start + nbytes > self._stretch.numel():
            own = self._make(nbytes)
            slot = Slot(self, None, own)
            self._aside[id(slot)] = own
        else:
            slot = Slot(self, start, self._stretch.data[start : start + nbytes])  # .data: versions of its own
            self._taken[start] = start + nbytes
        end = max(self._taken.values(), default=0) + sum(own.numel() for own in self._aside.values())
        self._needed = max(self._needed, end)
        return slot

    def _place(self, nbytes: int) -> int:
        """Behind the last slot; if that is too far, the first gap that is long enough."""
        end = max(self._taken.values(), default=0)
        if self._stretch is not None and end + nbytes > self._stretch.numel():
            at = 0
            for start in sorted(self._taken):
                if start - at >= nbytes:
                    return at
                at = self._taken[start]
        return end

    def _fit(self) -> None:
        """In a quiet moment, become as long as needed; a first guess may also have been too long."""
        if self._taken or self._aside:
            return
        self._settled = self._settled or self._needed > 0
        wanted = self._needed if self._settled else self._expected
        if wanted > self.nbytes or (self._expected and self._settled and wanted < FAR_OFF * self.nbytes):
            self._stretch = None  # first, so that both are never there at once
            self._stretch = self._make(wanted)
        if self._settled:
            self._expected = 0

    def _free(self, slot: Slot) -> None:
        if slot.start is None:
            self._aside.pop(id(slot), None)
        else:
            self._taken.pop(slot.start, None)

    @property
    def nbytes(self) -> int:
        return self._stretch.numel() if self._stretch is not None else 0

    @property
    def in_use(self) -> int:
        """Bytes of all slots that somebody holds."""
        inside = sum(stop - start for start, stop in self._taken.items())
        return inside + sum(own.numel() for own in self._aside.values())

    def tensors(self) -> list[Tensor]:
        """All memory there is."""
        return [*([self._stretch] if self._stretch is not None else []), *self._aside.values()]
