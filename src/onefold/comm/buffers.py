"""A pool of flat buffers that are reused, so that after the first steps nothing is allocated."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from onefold.comm.fitting import fit


def key_of(tensor: Tensor) -> int:
    """A number that identifies the storage of a plain tensor among all that are alive."""
    return tensor.untyped_storage()._cdata


class Pool:
    """Flat buffers for reuse: as many as were ever taken at once, none larger than the largest request.

    With `keeps=False`, as on CUDA, the pool keeps no free buffers: torch's caching allocator does, and between two uses
    their memory serves activations."""

    def __init__(self, device: torch.device, *, keeps: bool = True) -> None:
        self.device, self.keeps = device, keeps
        self._free: list[Tensor] = []
        self._out: dict[int, Tensor] = {}
        self._lock = threading.RLock()  # `give` may run inside `take`: in another thread, or in a destructor

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of `numel` elements with any content: the smallest free one that fits, or a new one."""
        with self._lock:
            if not (self.keeps or self._free):
                return self._hand_out(torch.empty(numel, dtype=dtype, device=self.device))
            wanted_bytes = numel * dtype.itemsize
            return self._hand_out(self._fitting(wanted_bytes))[:wanted_bytes].view(dtype)

    def _fitting(self, wanted_bytes: int) -> Tensor:
        index, large_enough = fit([buffer.numel() for buffer in self._free], wanted_bytes)
        if index is not None:
            buffer = self._free.pop(index)
            if large_enough:
                return buffer
            del buffer  # before the larger one is made
        return self._make(wanted_bytes)

    def _hand_out(self, buffer: Tensor) -> Tensor:
        self._out[key_of(buffer)] = buffer
        return buffer

    def _make(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give(self, taken: Tensor) -> None:
        with self._lock:
            buffer = self._out.pop(key_of(taken))
            if self.keeps:
                self._free.append(buffer)

    def drop(self, taken: Tensor) -> None:
        """Forgets a buffer that a message may still use: it is freed with the message, and not used again."""
        with self._lock:
            del self._out[key_of(taken)]

    def reserve(self, nbytes: int) -> None:
        """Adds a free buffer of this size, so that a later `take` allocates nothing."""
        if self.keeps:
            self._free.append(self._make(nbytes))

    def trim(self, keep_bytes: int = 0) -> None:
        """Frees buffers that are not taken, but for some of `keep_bytes` together."""
        with self._lock:
            while self._free and sum(buffer.nbytes for buffer in self._free) > keep_bytes:
                self._free.pop()

    def buffers(self) -> list[Tensor]:
        """All buffers, free and taken."""
        return [*self._free, *self._out.values()]

    def holds(self, key: object) -> bool:
        """Whether a storage is of one of them."""
        return key in self._out or any(key_of(buffer) == key for buffer in self._free)
