"""The tiers below a device, as one run has them: host memory, and files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.comm.buffers import Pool
from onefold.offload.disk import Scratch
from onefold.offload.files import check_folder
from onefold.offload.host import Host
from onefold.offload.host_memory import check_host
from onefold.offload.image import Image


class Reader(Protocol):
    def turned_to(self, here: bool) -> None: ...


class Tiers:
    def __init__(self, device: torch.device, *, keeps: bool = True) -> None:
        self.host = Host(device, keeps=keeps)
        self._scratch: Scratch | None = None
        self._turned_to: Reader | None = None

    def reserve(self, what: str, *, host_bytes: int, disk_bytes: int, path: str | Path | None) -> None:
        """Raises if what this rank is about to put there cannot fit; the ranks of a node share both. A rehearsal on
        tensors without memory fills nothing."""
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
        """Tensors that will rest in a file; in a rehearsal there is none."""
        return None if self._scratch is None else Image(self._scratch.file(0, name), pool, leaves)

    def turn_to(self, unit: Reader | None) -> None:
        """One unit at a time is kept at hand for reading."""
        if self._turned_to is not unit:
            before, self._turned_to = self._turned_to, None
            if before is not None:
                before.turned_to(False)
            if unit is not None:
                unit.turned_to(True)
                self._turned_to = unit

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
