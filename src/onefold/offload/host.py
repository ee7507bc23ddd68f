"""The host's side of a device: buffers that are used again, and copies that run beside compute.

Down go gradients and values, up come new values; each way has a stream of its own. A copy starts when the device has
come to its `after`, a mark that was set in the stream of compute, or by default to where compute is now. Who needs the
result either waits for it, or lets compute wait. On a CPU both sides are one memory: a copy is a copy, done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.spans import span
from onefold.offload.host_memory import host_bytes


class Mark(NamedTuple):
    """A point in the work of the device; on a CPU there is nothing to wait for."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until the device has come there."""
        if self.event is not None:
            with span("wait", "copy", "the device"):
                self.event.synchronize()

    def passed(self) -> bool:
        """Whether it has."""
        return self.event is None or self.event.query()

    def order(self) -> None:
        """What compute does from here on comes after it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostPool(Pool):
    """Buffers in host memory; pinned where a device copies from them."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pinned = pinned

    def _make(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=self.pinned)


class Host:
    def __init__(self, device: torch.device, *, keeps: bool = True) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.staging = HostPool(pinned=self.cuda)  # what copies start from or land in
        self.scratch = HostPool(pinned=False)  # what only processors see
        self.waiting = Pool(device, keeps=keeps)  # on the device: gradients that are to come here
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def keep(self, tensor: Tensor, *, pinned: bool = True) -> Tensor:
        """A copy in host memory for good; pinned, the device can copy from it beside compute."""
        kept = host_bytes(tensor.nbytes, pinned=pinned and self.cuda).view(tensor.dtype)
        return kept.copy_(tensor)

    def mark(self) -> Mark:
        """Where compute is now."""
        if not self.cuda:
            return Mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event)

    def to_host(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        """Start a copy from the device to the host; the mark that follows it."""
        return self._copy("down", source, target, after)

    def to_device(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        """Start a copy from the host to the device; the mark that follows it."""
        return self._copy("up", source, target, after)

    @contextmanager
    def before(self, copied: Mark) -> Iterator[None]:
        """What is started inside comes after a copy, and compute need not wait for it yet."""
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

    def _copy(self, way: str, source: Tensor, target: Tensor, after: Mark | None) -> Mark:
        if not self.cuda:
            target.copy_(source)
            return Mark()
        stream, after = self._stream(way), after or self.mark()
        assert after.event is not None
        stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return Mark(event)
