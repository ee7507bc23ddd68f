"""Between a device and its host: copies that run beside compute, on a stream of their own.

Forward: a copy leaves while the block computes; its source is held until the compute stream has waited for the copy,
one block later, when there is nothing left to wait for. Backward: a copy is started one block before it is needed. No
step waits for the host. On a CPU both sides are the same memory, and a copy is a copy.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onefold.offload.host_memory import host_bytes


class Moves(Protocol):
    """How bytes get to the host and back."""

    def host(self, nbytes: int) -> Tensor: ...

    def out(self, source: Tensor, target: Tensor) -> None: ...

    def back(self, source: Tensor, target: Tensor) -> None: ...

    def arrive(self) -> None: ...


def moves_of(device: torch.device) -> Moves:
    return CudaMoves(device) if device.type == "cuda" else PlainMoves()


class PlainMoves:
    """Host and device are one."""

    def host(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=False)

    def out(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def back(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def arrive(self) -> None:
        pass


class CudaMoves:
    """One stream for both ways, so that a piece of host memory is read before it is written again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []  # what must stay until its copy is done

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def host(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=True)

    def out(self, source: Tensor, target: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self._leaving.append((source, self.stream.record_event()))

    def back(self, source: Tensor, target: Tensor) -> None:
        """Inside `with torch.cuda.stream(moves.stream)`."""
        target.copy_(source, non_blocking=True)

    def arrive(self) -> None:
        """What left one block ago has left."""
        for _, copied in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._leaving.clear()
