"""The tiers below one rank's device: host memory, and scratch files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.comm.buffers import Pool
from onefold.comm.streams import StreamEvent
from onefold.offload.disk import Scratch
from onefold.offload.files import check_folder
from onefold.offload.host import Host
from onefold.offload.host_memory import check_host
from onefold.offload.image import Image


class Loadable(Protocol):
    """A unit whose state can be loaded into memory and unloaded."""

    def set_loaded(self, loaded: bool) -> None: ...


class Tiers:
    def __init__(self, device: torch.device, *, keeps: bool = True) -> None:
        self.host = Host(device, keeps=keeps)
        self._scratch: Scratch | None = None
        self._loaded: Loadable | None = None
        self._snapshot = StreamEvent()  # after the last copy of state on the device that was queued beside training

    def reserve(self, what: str, *, host_bytes: int, disk_bytes: int, path: str | Path | None) -> None:
        """Raises unless so many bytes per rank fit into host memory and on disk, which the ranks of a machine share;
        `what` they are for. The first call with a path makes the scratch files' folder known. A rehearsal on tensors
        without memory reserves nothing."""
        if isinstance(torch.empty(0, device="cpu"), FakeTensor):
            return
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if host_bytes:
            check_host(host_bytes * ranks, what)
        if path is not None:
            if self._scratch is None:
                self._scratch = Scratch(path, disk_bytes * ranks)
            else:
                check_folder(self._scratch.path, disk_bytes * ranks)

    def image(self, name: str, pool: Pool, leaves: Callable[[], list[Tensor]]) -> Image | None:
        """An image that keeps these tensors in a new file; None in a rehearsal, which has no files."""
        return None if self._scratch is None else Image(self._scratch.file(0, name), pool, leaves)

    def load_for_reading(self, unit: Loadable | None) -> None:
        """Loads the state of a unit for reading, and unloads the unit that was loaded before: one unit at a time is in
        memory. None unloads only."""
        if self._loaded is not unit:
            before, self._loaded = self._loaded, None
            if before is not None:
                before.set_loaded(False)
            if unit is not None:
                unit.set_loaded(True)
                self._loaded = unit

    # -- snapshots of state on the device -----------------------------------------------------------------------------

    def snapshot_until(self, event: StreamEvent) -> None:
        """A side stream copies master and optimizer state to the host until this event."""
        self._snapshot = event

    def wait_for_snapshot(self) -> None:
        """Makes the current stream wait for that copy: what follows may write what it reads."""
        self._snapshot.stream_wait()

    def end_snapshot(self) -> None:
        """The same, once for all later writes: they are on the current stream, too."""
        event, self._snapshot = self._snapshot, StreamEvent()
        event.stream_wait()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
