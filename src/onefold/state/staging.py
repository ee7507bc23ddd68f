"""Where a unit's own values lie while the host updates them.

Values that are on the device come down into a buffer and go up again; values that rest on the host are updated there.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from onefold.comm.spans import span
from onefold.cost.layout import Span
from onefold.offload.host import Host, Mark
from onefold.state.flat_parameters import FlatParameters


class StagingBuffer:
    def __init__(self, values: FlatParameters, owned: Span, host: Host) -> None:
        self._flat_params, self._owned, self._host = values, owned, host
        self._buffer: Tensor | None = None
        self._coming = Mark()
        self._leaving: tuple[Mark, Tensor] | None = None
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        return self._flat_params.dtype

    def part(self, span: Span) -> Tensor:
        """These elements, to be read and changed."""
        if self._flat_params.on_host:
            return self._flat_params.part(span)
        assert self._buffer is not None
        return self._buffer[span.start - self._owned.start : span.stop - self._owned.start]

    def start(self, after: Mark | None = None, *, fill: bool) -> None:
        """Begin to bring the values; without `fill` all of them will be written."""
        if self._flat_params.on_host:
            self._flat_params.start()
            self._coming = after or self._host.mark()  # until then the device may be copying from there
        elif self._buffer is None:
            self.reap()
            self._buffer = self._host.staging.take(self._owned.numel, self.dtype)
            self._coming = Mark()
            if fill:
                with span("download", "values", self._flat_params.name):
                    self._coming = self._host.to_host(self._flat_params.part(self._owned), self._buffer, after)

    def open(self) -> None:
        if self._flat_params.on_host:
            self._flat_params.load_shard()
        self._coming.wait()

    def close(self, *, changed: bool, after: Mark | None = None) -> Mark:
        """Back to where they belong; when they are there."""
        if self._flat_params.on_host:
            self._flat_params.unload_shard(changed=changed)
            return Mark()
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        if not changed:
            self._coming.wait()  # nobody may have
            self._host.staging.give(buffer)
            return Mark()
        with span("upload", "values", self._flat_params.name):
            there = self._host.to_device(buffer, self._flat_params.part(self._owned), after)
        self._leaving = there, buffer
        if there.event is None:
            self.reap()
        return there

    def reap(self) -> None:
        """What went up, or into a file, is there; its buffer is free."""
        self._flat_params.reap()
        with self._lock:  # whoever updates and whoever reads may both come here
            behind, self._leaving = self._leaving, None
        if behind is not None:
            behind[0].wait()
            self._host.staging.give(behind[1])
