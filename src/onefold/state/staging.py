"""The staging buffer of one unit: where the host updates the part of its parameters that this rank owns.

Parameters kept on the device are copied into a pinned buffer and back. Parameters kept on the host, or in a file, are
updated where they are, and the staging buffer only forwards to them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.cost.layout import Span
from onefold.offload.host import Host
from onefold.state.flat_parameters import FlatParameters


class StagingBuffer:
    def __init__(self, flat_params: FlatParameters, owned: Span, host: Host) -> None:
        self._flat_params, self._owned, self._host = flat_params, owned, host
        self._buffer: Tensor | None = None
        self._borrowed = False  # the caller of `start_load` owns the buffer: it does not go back to the pool
        self._loaded = StreamEvent()  # the copy into the buffer
        self._storing: tuple[StreamEvent, Tensor] | None = None  # the copy back to the device, and its source
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        return self._flat_params.dtype

    def part(self, span: Span) -> Tensor:
        """These elements of the unit, to be read and changed; between `finish_load` and `store`."""
        if self._flat_params.on_host:
            return self._flat_params.part(span)
        assert self._buffer is not None
        return self._buffer[span.start - self._owned.start : span.stop - self._owned.start]

    def start_load(self, after: StreamEvent | None = None, *, fill: bool, into: Tensor | None = None) -> None:
        """Starts to copy the parameters to `into`, or to a buffer of the pool, once `after` has passed. Without `fill`
        the buffer stays uninitialised, for an update that writes every element."""
        if self._flat_params.on_host:
            self._flat_params.start_load()
            self._loaded = after or self._host.record_event()  # until then the device may be copying from there
        elif self._buffer is None:
            self.wait_stored()
            self._buffer, self._borrowed = into, into is not None
            if self._buffer is None:
                self._buffer = self._host.staging.take(self._owned.numel, self.dtype)
            self._loaded = StreamEvent()
            if fill:
                with span("download", "parameters", self._flat_params.name):
                    self._loaded = self._host.load(self._flat_params.part(self._owned), self._buffer, after)

    def finish_load(self) -> None:
        """Waits until the parameters are in host memory."""
        if self._flat_params.on_host:
            self._flat_params.load_shard()
        self._loaded.wait()

    def store(self, *, changed: bool, after: StreamEvent | None = None) -> StreamEvent:
        """Starts to copy `changed` parameters back to where they are kept, once `after` has passed, and frees the
        buffer; the event after which the device may read them."""
        if self._flat_params.on_host:
            self._flat_params.unload_shard(changed=changed)
            return StreamEvent()
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        if not changed:
            self._loaded.wait()  # an error may have come before finish_load
            self._give(buffer)
            return StreamEvent()
        with span("upload", "parameters", self._flat_params.name):
            stored = self._host.to_device(buffer, self._flat_params.part(self._owned), after)
        self._storing = None if self._borrowed else (stored, buffer)
        if stored.event is None:
            self.wait_stored()
        return stored

    def wait_stored(self) -> None:
        """Waits until the copy that `store` started has completed, and returns its buffer to the pool."""
        self._flat_params.wait_stored()
        with self._lock:  # the thread that updates and the one that reads may both come here
            storing, self._storing = self._storing, None
            if storing is not None:
                storing[0].wait()
                self._host.staging.give(storing[1])

    def _give(self, buffer: Tensor) -> None:
        if not self._borrowed:
            self._host.staging.give(buffer)
