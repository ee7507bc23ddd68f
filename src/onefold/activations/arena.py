"""The arena: one buffer for the block inputs that are kept from forward to backward, against fragmentation (M_D).

Among short-lived tensors, each long-lived one would pin a part of the allocator's memory, and the gaps between them
would be too small for the next large tensor. In the arena they are adjacent: forward adds one after the other, backward
frees them from the end. At first the buffer has the length that was expected; as soon as it is empty after a first use,
it gets exactly the length that was needed. What does not fit until then is allocated separately.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OVERSIZED = 0.75  # a first buffer is made shorter if less than this part of it was needed


class Slot:
    """A piece of an arena, which is free again when this object is."""

    __slots__ = ("_arena", "_tensor", "nbytes", "start")

    def __init__(self, arena: Arena, start: int | None, tensor: Tensor) -> None:
        self._arena, self.start, self._tensor, self.nbytes = arena, start, tensor, tensor.numel()

    def view(self, dtype: torch.dtype) -> Tensor:
        return self._tensor.view(dtype)

    def __del__(self) -> None:
        self._arena._free(self)


class Arena:
    """`make` allocates so many bytes as one uint8 tensor."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._buffer: Tensor | None = None
        self._taken: dict[int, int] = {}  # start -> stop, of slots in the buffer
        self._separate: dict[int, Tensor] = {}  # id of a slot -> memory that was allocated for it
        self._needed = 0  # the length of buffer that would have held all slots at every moment
        self._expected = 0
        self._settled = False  # whether a first use has shown what is needed

    def expect(self, nbytes: int) -> None:
        """Sets the buffer's first length, before a first use has shown what is needed."""
        if not self._settled and not self._taken and not self._separate:
            self._expected = max(self._expected, nbytes)

    def start_anew(self) -> None:
        """Frees the buffer if no slot is taken; its next length is again what is expected, until a use shows what is
        needed."""
        if not self._taken and not self._separate:
            self._buffer, self._needed, self._expected, self._settled = None, 0, 0, False

    def take(self, nbytes: int) -> Slot:
        self._fit()
        start = self._place(nbytes)
        if self._buffer is None or start + nbytes > self._buffer.numel():
            own = self._make(nbytes)
            slot = Slot(self, None, own)
            self._separate[id(slot)] = own
        else:
            # .data: a version counter for each slot.
            slot = Slot(self, start, self._buffer.data[start : start + nbytes])
            self._taken[start] = start + nbytes
        end = max(self._taken.values(), default=0) + sum(own.numel() for own in self._separate.values())
        self._needed = max(self._needed, end)
        return slot

    def _place(self, nbytes: int) -> int:
        """Where a slot starts: after the last one; if that does not fit, in the first gap that is long enough."""
        end = max(self._taken.values(), default=0)
        if self._buffer is not None and end + nbytes > self._buffer.numel():
            at = 0
            for start in sorted(self._taken):
                if start - at >= nbytes:
                    return at
                at = self._taken[start]
        return end

    def _fit(self) -> None:
        """If no slot is taken, makes the buffer as long as needed; shorter only if its first length was too long."""
        if self._taken or self._separate:
            return
        self._settled = self._settled or self._needed > 0
        wanted = self._needed if self._settled else self._expected
        if wanted > self.nbytes or (self._expected and self._settled and wanted < OVERSIZED * self.nbytes):
            self._buffer = None  # first, so that both are never allocated at once
            self._buffer = self._make(wanted)
        if self._settled:
            self._expected = 0

    def _free(self, slot: Slot) -> None:
        if slot.start is None:
            self._separate.pop(id(slot), None)
        else:
            self._taken.pop(slot.start, None)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel() if self._buffer is not None else 0

    @property
    def in_use(self) -> int:
        """Bytes of all slots that are taken."""
        inside = sum(stop - start for start, stop in self._taken.items())
        return inside + sum(own.numel() for own in self._separate.values())

    def tensors(self) -> list[Tensor]:
        """All memory of the arena."""
        return [*([self._buffer] if self._buffer is not None else []), *self._separate.values()]
