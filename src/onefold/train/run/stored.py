"""A vector of integers in files, read a slice at a time: memory is that of the slice, however large the files are.

Files are not mapped: what was read of a mapped file counts as this process's memory until the kernel wants it back, and
a limit on address space (ulimit -v) would have to hold all of them.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.errors import OnefoldError
from onefold.offload.host_memory import bytes_of

MOST_OPEN = 64  # files at a time


class OpenFile:
    """A file that stays open for as long as this object is used."""

    def __init__(self, path: Path, opened: int | None = None) -> None:
        """`opened` is a descriptor, which is copied; without it `path` is opened."""
        self.path = path
        try:
            self._opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else os.dup(opened)
        except OSError as error:
            raise OnefoldError(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._opened)

    def read(self, offset: int, out: Tensor) -> None:
        """Fills the tensor with the bytes from there on."""
        rest = bytes_of(out)
        while rest:
            try:
                count = os.preadv(self._opened, [rest], offset)
            except OSError as error:
                raise OnefoldError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise OnefoldError(f"{self.path} has become shorter while it was used; start again with all of it")
            rest, offset = rest[count:], offset + count


class Stretch(NamedTuple):
    """Tokens that lie together in one file."""

    path: Path
    dtype: torch.dtype
    offset: int  # bytes
    length: int  # tokens


class Tokens:
    """The tokens of all stretches, one after the other. A slice is a tensor of int64.

    >>> Tokens([])[0:0]
    tensor([], dtype=torch.int64)
    """

    def __init__(self, stretches: Sequence[Stretch], opened: OpenFile | None = None) -> None:
        """`opened` is the file of a single stretch, if it is open already."""
        self._stretches = tuple(stretches)
        self._ends = list(accumulate(one.length for one in self._stretches))
        self._files: OrderedDict[int, OpenFile] = OrderedDict()
        if opened is not None:
            assert len(self._stretches) == 1
            self._files[0] = opened

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, step = part.indices(len(self))
        assert step == 1
        out = torch.empty(max(0, stop - start), dtype=torch.int64)
        at, number = start, bisect_right(self._ends, start)
        while at < stop:
            one, end = self._stretches[number], min(stop, self._ends[number])
            place = at - (self._ends[number] - one.length)
            values = torch.empty(end - at, dtype=one.dtype)
            self._file(number).read(one.offset + place * one.dtype.itemsize, values)
            out[at - start : end - start] = values
            at, number = end, number + 1
        return out

    def _file(self, number: int) -> OpenFile:
        """Few stay open: those that were read last."""
        if number not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._files.popitem(last=False)
            self._files[number] = OpenFile(self._stretches[number].path)
        self._files.move_to_end(number)
        return self._files[number]
