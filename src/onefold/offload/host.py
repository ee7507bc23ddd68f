"""Transfers between a device and host memory, on streams of their own beside compute, and their pinned buffers.

Gradients and parameters are copied to the host, updated parameters back to the device; each of the three has a CUDA
stream: copies of gradients wait for backward, and copies of parameters must not wait behind them. A copy starts once an
event of the compute stream has passed: `after`, or by default one recorded now. It returns its own event: `wait` blocks
the host until the copy has completed, `stream_wait` makes the compute stream wait. On a CPU a copy completes before the
call returns, and events are empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.streams import StreamEvent, event_now
from onefold.offload.host_memory import host_bytes


class HostPool(Pool):
    """A pool of buffers in host memory."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pinned = pinned

    def _make(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=self.pinned)


class Host:
    """The host side of one device: its buffer pools and its copy streams."""

    def __init__(self, device: torch.device, *, keeps: bool = True) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.staging = HostPool(pinned=self.cuda)  # sources and targets of transfers
        self.scratch = HostPool(pinned=False)  # used by the CPU only
        self.waiting = Pool(device, keeps=keeps)  # on the device: gradients until they have been copied to the host
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def keep(self, tensor: Tensor, *, pinned: bool = True) -> Tensor:
        """A copy of a tensor in host memory, in a buffer of its own, outside the pools."""
        kept = host_bytes(tensor.nbytes, pinned=pinned and self.cuda).view(tensor.dtype)
        return kept.copy_(tensor)

    def record_event(self) -> StreamEvent:
        """An event recorded in the compute stream now."""
        return event_now(self.device)

    def to_host(self, source: Tensor, target: Tensor, after: StreamEvent | None = None) -> StreamEvent:
        """Starts a copy from the device to the host once `after` has passed; the event of its end."""
        return self._copy("down", source, target, after)

    def load(self, source: Tensor, target: Tensor, after: StreamEvent | None = None) -> StreamEvent:
        """As `to_host`, of parameters: it does not wait for gradients whose copies were started before."""
        return self._copy("load", source, target, after)

    def to_device(self, source: Tensor, target: Tensor, after: StreamEvent | None = None) -> StreamEvent:
        """Starts a copy from the host to the device once `after` has passed; the event of its end."""
        return self._copy("up", source, target, after)

    @contextmanager
    def after_copy(self, copied: StreamEvent) -> Iterator[None]:
        """Inside, the current stream is the one that copies to the device: what is enqueued runs after that copy, and
        the compute stream does not wait."""
        if copied.event is None:
            yield
            return
        with torch.cuda.stream(self._stream("up")):
            yield

    def _stream(self, way: str) -> torch.cuda.Stream:
        with self._lock:
            if way not in self._streams:
                self._streams[way] = torch.cuda.Stream(self.device)
            return self._streams[way]

    def _copy(self, way: str, source: Tensor, target: Tensor, after: StreamEvent | None) -> StreamEvent:
        if not self.cuda:
            target.copy_(source)
            return StreamEvent()
        stream, after = self._stream(way), after or self.record_event()
        assert after.event is not None
        stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return StreamEvent(event)
