"""Transfers of block inputs between a device and its host, on a CUDA stream of their own beside compute.

In forward, an input is copied to the host while its block computes; its source is held until the compute stream has
waited for the copy, one block later, when it has completed. In backward, a copy starts one block before it is needed.
The host never waits. On a CPU a transfer is a plain copy.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onefold.offload.host_memory import host_bytes


class Transfers(Protocol):
    """Copies to the host and back."""

    def host(self, nbytes: int) -> Tensor: ...

    def to_host(self, source: Tensor, target: Tensor) -> None: ...

    def to_device(self, source: Tensor, target: Tensor) -> None: ...

    def wait_copied(self) -> None: ...


def transfers_of(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else CpuTransfers()


class CpuTransfers:
    def host(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=False)

    def to_host(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait_copied(self) -> None:
        pass


class CudaTransfers:
    """One stream for both directions, so that host memory is read before it is written again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._copying: list[tuple[Tensor, torch.cuda.Event]] = []  # sources, held until their copies have completed

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def host(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=True)

    def to_host(self, source: Tensor, target: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self._copying.append((source, self.stream.record_event()))

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Must be called inside `with torch.cuda.stream(transfers.stream)`."""
        target.copy_(source, non_blocking=True)

    def wait_copied(self) -> None:
        """Makes the compute stream wait for the copies to the host that were started, and frees their sources."""
        for _, copied in self._copying:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._copying.clear()
