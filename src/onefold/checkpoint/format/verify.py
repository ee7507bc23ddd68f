"""Verifies a committed checkpoint: reads every byte and checks every digest, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from onefold.checkpoint.format.folder import MANIFEST
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import CHUNK_BYTES
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
