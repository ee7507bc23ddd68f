"""Verifies a committed checkpoint: reads every byte and checks every digest, in constant memory. A file that is being
received is verified as its bytes come, without reading it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from onefold.checkpoint.format.folder import MANIFEST
from onefold.checkpoint.format.manifest import RankPart
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import CHUNK_BYTES, Digests
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged


class Damage(NamedTuple):
    """What is damaged: a tensor in a file, or the file, if no tensor in it can be read."""

    file: str
    tensor: str | None
    what: str


def verify(
    storage: Storage,
    folder: Path,
    progress: Callable[[int], None] = lambda _: None,
    only: Collection[str] | None = None,
) -> list[Damage]:
    """All damage in a checkpoint, or in some files of it; calls `progress` with the number of bytes checked. Raises if
    damage cannot be known: a file that this user may not read, or a checkpoint that its run removes meanwhile, is not
    damaged."""
    try:
        checkpoint = Checkpoint(storage, folder)
    except CheckpointDamaged as error:
        return [Damage(MANIFEST, None, str(error))]
    return list(_damages(checkpoint, progress, only))


def check(storage: Storage, folder: Path, only: Collection[str] | None = None) -> None:
    """Raises CheckpointDamaged, naming all damage, if there is any in the checkpoint, or in some files of it."""
    damages = verify(storage, folder, only=only)
    if damages:
        raise CheckpointDamaged("; ".join(damage.what for damage in damages))


def _damages(checkpoint: Checkpoint, progress: Callable[[int], None], only: Collection[str] | None) -> Iterator[Damage]:
    scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    for record in checkpoint.manifest.files:
        if only is not None and record.name not in only:
            continue
        try:
            checkpoint.file(record.name)
        except CheckpointDamaged as error:
            yield Damage(record.name, None, str(error))
            continue
        for entry in checkpoint.entries_of(record.name):
            dtype = checkpoint.record_of(entry).dtype(entry.state)
            whole = scratch.view(dtype)
            for start in range(entry.start, entry.stop, whole.numel()):
                part = Span(start, min(start + whole.numel(), entry.stop))
                try:
                    checkpoint.read_entry(entry, part, whole[: part.numel])
                except CheckpointDamaged as error:
                    yield Damage(record.name, entry.name, str(error))
                progress(part.numel * dtype.itemsize)


class Arriving:
    """A rank's file whose bytes come one piece after the other, compared with what that rank says it wrote."""

    def __init__(self, name: str, part: RankPart) -> None:
        self._name, self._part = name, part
        self._bytes, self._header = 0, bytearray()
        self._tensors: Iterator[tuple[str, int]] | None = None  # name and bytes, once the header is there
        self._found: dict[str, Digests] = {}
        self._last, self._room = Digests(), 0  # of the tensor whose bytes come now: its digests, bytes yet to come

    def take(self, data: memoryview) -> None:
        """The next bytes; they may be overwritten afterwards."""
        self._bytes += len(data)
        if self._tensors is None:
            data = self._take_header(data)
        while len(data):
            if not self._room:
                key, self._room = next(self._tensors or iter(()), ("what follows the last tensor", len(data)))
                self._last = self._found[key] = Digests()
            mine, data = data[: self._room], data[self._room :]
            self._room -= len(mine)
            for sha, piece in self._last.cut(mine):
                sha.update(piece)

    def check(self) -> None:
        """Raises CheckpointDamaged, naming the file and a tensor in it, unless all bytes came as they were written."""
        if self._bytes != self._part.file.bytes:
            raise CheckpointDamaged(
                f"{self._name} came with {self._bytes:,} bytes, but {self._part.file.bytes:,} were written"
            )
        if hashlib.sha256(self._header).hexdigest() != self._part.file.header_sha256:
            raise CheckpointDamaged(f"{self._name} came with a header that is not the one written (SHA-256 differs)")
        for entry in self._part.entries:
            if entry.key not in self._found or self._found[entry.key].hex() != entry.sha256:
                raise CheckpointDamaged(
                    f"{self._name}: tensor {entry.key} came with bytes that are not those written (SHA-256 differs)"
                )

    def _take_header(self, data: memoryview) -> memoryview:
        """Takes what belongs to the header, and returns what follows it."""
        while len(data) and self._tensors is None:
            wanted = 8 if len(self._header) < 8 else 8 + int.from_bytes(self._header[:8], "little")
            room = wanted - len(self._header)
            self._header += data[:room]
            data = data[room:]
            if len(self._header) == wanted > 8:
                self._tensors = self._listed()
        return data

    def _listed(self) -> Iterator[tuple[str, int]]:
        """The tensors of the header, which is parsed only if it is the one that was written."""
        if hashlib.sha256(self._header).hexdigest() == self._part.file.header_sha256:
            table = json.loads(self._header[8:])
            table.pop("__metadata__", None)
            for key, row in table.items():
                yield key, row["data_offsets"][1] - row["data_offsets"][0]
