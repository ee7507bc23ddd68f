"""A checkpoint that is being written, and what must hold before it is begun and before it is committed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from onefold.checkpoint.format.folder import MANIFEST, committed, step_name, step_of
from onefold.checkpoint.format.manifest import FileRecord, file_name
from onefold.checkpoint.format.storage import Storage
from onefold.errors import CheckpointError


class Draft(NamedTuple):
    """A checkpoint that is being written: on a file system in a hidden folder, in a store without its manifest."""

    run: Path
    step: int
    folder: Path
    attempt: str = ""  # in the names of files in a store: no two saves write the same object
    replaces: str | None = None  # the version of the manifest that is there, in a store

    def file(self, rank: int) -> Path:
        return self.folder / file_name(rank, self.attempt)


def check_order(storage: Storage, run: Path, step: int, *, overwrite: bool) -> list[int]:
    """The steps that are committed. Raises if this step may not be saved there: an old one, or in a checkpoint."""
    if step_of(run.name) is not None and MANIFEST in storage.names(run):
        raise CheckpointError(f"{run} is a checkpoint, which is never written again; save to its run, {run.parent}")
    steps = committed(storage, run)
    newest = max(steps, default=-1)
    if step <= newest and not (overwrite and step in steps):
        raise CheckpointError(
            f"{run / step_name(newest)} is committed, and step {step} would overwrite it or stand behind it, so "
            f"that load({str(run)!r}) would not take it; save to another folder, move that one away, or replace the "
            f"checkpoint of the same step with overwrite=True"
        )
    return steps


def check_size(draft: Draft, file: FileRecord, found: int | None) -> None:
    """Raises unless rank 0 sees a file as large as it was written; None if it sees none."""
    if found != file.bytes:
        raise CheckpointError(
            f"{draft.folder / file.name} was written with {file.bytes:,} bytes, but rank 0 sees "
            f"{'no such file' if found is None else f'{found:,} bytes'}; all ranks must see the same folder"
        )
