"""The image of a unit's tensors in a file, from which they are loaded and to which they are stored together.

While the tensors are only in the file, each is a placeholder of its own shape that reads as NaN. `load` makes them
views of one buffer that is read in one request; `store` writes that buffer in one request, and `wait_stored` waits for
it. A tensor has the same offset in the file as in the buffer: cutting a tensor in two moves nothing, and a new tensor
makes the next `store` lay them all out again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onefold.comm.buffers import Pool, key_of

PAGE = 4096
LEAST_NUMEL = 64  # shorter tensors (step counts) stay in memory


class Waiting(Protocol):
    def wait(self) -> None: ...


class File(Protocol):
    """What an image needs of a file."""

    nbytes: int

    def read(self, buffer: Tensor) -> Waiting: ...

    def write(self, buffer: Tensor) -> Waiting: ...

    def resize(self, nbytes: int) -> None: ...


class _Place(NamedTuple):
    """Where a tensor is in the file, and its form, which its placeholder has not."""

    leaf: Tensor
    start: int  # byte
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor as a view of a buffer of the file's bytes."""
        stop = self.start + self.shape.numel() * self.leaf.itemsize
        return buffer[self.start : stop].view(self.leaf.dtype).as_strided(self.shape, self.stride)


class Image:
    def __init__(self, file: File, pool: Pool, leaves: Callable[[], list[Tensor]]) -> None:
        self._file, self._pool, self._leaves = file, pool, leaves
        self._places: list[_Place] = []
        self._buffer: Tensor | None = None
        self._reading: Waiting | None = None
        self._writing: tuple[Waiting, Tensor] | None = None
        self._failed: Exception | None = None  # the error of the last write: the file does not hold what it should
        self.is_loaded = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes

    def start_load(self) -> None:
        """Starts to read the file, ahead of `load`."""
        if self._buffer is None and self._places:
            self.wait_stored()
            buffer = self._pool.take(self._file.nbytes, torch.uint8)
            try:
                self._reading = self._file.read(buffer)
            except BaseException:
                self._pool.give(buffer)
                raise
            self._buffer = buffer

    def load(self) -> None:
        """Waits until the tensors are in memory, to be read or changed."""
        self.start_load()
        if self._reading is not None:
            self._finish_read()
        if not self.is_loaded:
            self.is_loaded = True
            for place in self._places:
                assert self._buffer is not None
                place.leaf.data = place.view(self._buffer)

    def _finish_read(self) -> None:
        """Waits for the read; if it fails, its buffer is freed. After a KeyboardInterrupt the read goes on, and the
        next call waits again."""
        assert self._reading is not None and self._buffer is not None
        try:
            self._reading.wait()
        except Exception:
            buffer, self._buffer, self._reading = self._buffer, None, None
            self._pool.give(buffer)
            raise
        self._reading = None

    def store(self, *, changed: bool) -> None:
        """Makes the tensors placeholders again. If `changed`, starts to write them to the file as they are now; else
        the file keeps what it has."""
        if self._reading is not None:  # start_load without load
            with suppress(Exception):
                self._finish_read()
        self.is_loaded = False
        if changed:
            leaves = [leaf for leaf in self._leaves() if belongs_in_file(leaf)]
            self._lay_out(leaves)
            self._places = [_Place(leaf, _start(leaf, self._buffer), leaf.shape, leaf.stride()) for leaf in leaves]
        for leaf, _, shape, _ in self._places:
            blank = torch.full((), float("nan") if leaf.is_floating_point() else 0, dtype=leaf.dtype)
            leaf.data = blank.expand(shape)
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if changed:
            self.wait_stored()
            self._writing = self._file.write(buffer), buffer
        else:
            self._pool.give(buffer)

    def wait_stored(self) -> None:
        """Waits until the last write has completed, and returns its buffer to the pool; raises if the write failed."""
        with self._lock:  # the thread that updates and the one that reads may both come here, and both must wait
            if self._writing is not None:
                pending, buffer = self._writing
                try:
                    pending.wait()
                    self._pool.give(buffer)
                except Exception as error:
                    self._failed = error
                self._writing = None  # not reached after a KeyboardInterrupt: the write goes on
        if self._failed is not None:
            raise self._failed

    def _lay_out(self, leaves: list[Tensor]) -> None:
        """Copies the tensors into one new buffer, and resizes the file, unless they are in the current buffer."""
        old = self._buffer
        if old is not None and all(key_of(leaf) == key_of(old) for leaf in leaves):
            return
        total = -(-sum(_padded(leaf) for leaf in leaves) // PAGE) * PAGE
        if not total:
            return
        self._buffer, at = self._pool.take(total, torch.uint8), 0
        for leaf in leaves:
            dense = torch.empty_like(leaf, device="meta").stride()  # its own, unless it has gaps
            leaf.data = _Place(leaf, at, leaf.shape, dense).view(self._buffer).copy_(leaf)
            at += _padded(leaf)
        if old is not None:
            self._pool.give(old)
        self.wait_stored()
        self._file.resize(total)


def belongs_in_file(leaf: Tensor) -> bool:
    """Whether a tensor is kept in the file; short ones stay in memory."""
    return leaf.numel() >= LEAST_NUMEL


def _padded(leaf: Tensor) -> int:
    return -(-leaf.nbytes // 256) * 256


def _start(leaf: Tensor, buffer: Tensor | None) -> int:
    assert buffer is not None
    return leaf.data_ptr() - buffer.data_ptr()
