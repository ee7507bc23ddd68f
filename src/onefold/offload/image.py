"""Tensors of one unit that rest in a file and come to memory together, as one stretch of bytes.

While they rest, each is a placeholder of its own length that reads as NaN. Opened, they are views of a buffer that was
read in one go; closed, the buffer is written in one go, and `reap` waits for that. Where they lie in the file is where
they lie in the buffer: cutting a tensor in two moves nothing, and a new one makes all move together, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from onefold.comm.buffers import Pool, key_of

PAGE = 4096
LEAST_NUMEL = 64  # what is shorter stays in memory: counts of steps


class Waiting(Protocol):
    def wait(self) -> None: ...


class File(Protocol):
    """As much as an image needs of a file."""

    nbytes: int

    def read(self, buffer: Tensor) -> Waiting: ...

    def write(self, buffer: Tensor) -> Waiting: ...

    def resize(self, nbytes: int) -> None: ...


class Image:
    def __init__(self, file: File, pool: Pool, leaves: Callable[[], list[Tensor]]) -> None:
        self._file, self._pool, self._leaves = file, pool, leaves
        self._places: list[tuple[Tensor, int, int]] = []  # tensor, where it starts, its elements
        self._buffer: Tensor | None = None
        self._reading: Waiting | None = None
        self._writing: tuple[Waiting, Tensor] | None = None
        self._failed: Exception | None = None  # why the file does not hold what was written last
        self.is_open = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """On disk."""
        return self._file.nbytes

    def start(self) -> None:
        """Begin to read, ahead of need."""
        if self._buffer is None and self._places:
            self.reap()
            buffer = self._pool.take(self._file.nbytes, torch.uint8)
            try:
                self._reading = self._file.read(buffer)
            except BaseException:
                self._pool.give(buffer)
                raise
            self._buffer = buffer

    def open(self) -> None:
        """All tensors are in memory, to be read or changed."""
        self.start()
        if self._reading is not None:
            self._finish_read()
        if not self.is_open:
            self.is_open = True
            for leaf, start, numel in self._places:
                assert self._buffer is not None
                leaf.data = self._buffer[start : start + numel * leaf.itemsize].view(leaf.dtype)

    def _finish_read(self) -> None:
        """What was not read is not there. An interrupted wait is no end: the disk goes on."""
        assert self._reading is not None and self._buffer is not None
        try:
            self._reading.wait()
        except Exception:
            buffer, self._buffer, self._reading = self._buffer, None, None
            self._pool.give(buffer)
            raise
        self._reading = None

    def close(self, *, changed: bool) -> None:
        """They rest again, as they are now, or as they were."""
        if self._reading is not None:  # nobody opened them
            with suppress(Exception):
                self._finish_read()
        self.is_open = False
        if changed:
            leaves = [leaf for leaf in self._leaves() if rests(leaf)]
            self._lay(leaves)
            self._places = [(leaf, _start(leaf, self._buffer), leaf.numel()) for leaf in leaves]
        for leaf, _, numel in self._places:
            blank = torch.full((), float("nan") if leaf.is_floating_point() else 0, dtype=leaf.dtype)
            leaf.data = blank.expand(numel)
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if changed:
            self.reap()
            self._writing = self._file.write(buffer), buffer
        else:
            self._pool.give(buffer)

    def reap(self) -> None:
        """What is being written has been written; its buffer is free."""
        with self._lock:  # whoever updates and whoever reads may both come here: neither goes on before it is there
            if self._writing is not None:
                pending, buffer = self._writing
                try:
                    pending.wait()
                    self._pool.give(buffer)
                except Exception as error:
                    self._failed = error
                self._writing = None  # not after an interrupt: the disk goes on
        if self._failed is not None:
            raise self._failed

    def _lay(self, leaves: list[Tensor]) -> None:
        """Into one buffer, unless they lie in it."""
        old = self._buffer
        if old is not None and all(key_of(leaf) == key_of(old) for leaf in leaves):
            return
        total = -(-sum(_padded(leaf) for leaf in leaves) // PAGE) * PAGE
        if not total:
            return
        self._buffer, at = self._pool.take(total, torch.uint8), 0
        for leaf in leaves:
            place = self._buffer[at : at + leaf.nbytes].view(leaf.dtype)
            place.copy_(leaf)
            leaf.data = place
            at += _padded(leaf)
        if old is not None:
            self._pool.give(old)
        self.reap()
        self._file.resize(total)


def rests(leaf: Tensor) -> bool:
    """Whether it is long enough for a file."""
    return leaf.ndim == 1 and leaf.numel() >= LEAST_NUMEL


def _padded(leaf: Tensor) -> int:
    return -(-leaf.nbytes // 256) * 256


def _start(leaf: Tensor, buffer: Tensor | None) -> int:
    assert buffer is not None
    return leaf.data_ptr() - buffer.data_ptr()
