"""How a checkpoint comes to be, all or nothing, on one storage. No processes: rank 0 calls all of this.

    begin    the run's folder exists for good; leftovers of saves that died are gone; a hidden folder is made
    (write)  every rank writes and flushes its file in there
    commit   all files are seen; manifest, flushed; folder, flushed; renamed to its name; run folder, flushed
    retain   an older checkpoint is renamed out of sight, that is flushed, and only then is it deleted

So a folder named step-… is whole, at any instant and after any loss of power, and is never written again. The newest
is the one with the highest step; no file points to it.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import NamedTuple

from onefold.checkpoint.format.folder import MANIFEST, committed, remove_all, step_name, step_of
from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.errors import CheckpointError

LOG = logging.getLogger("onefold")

WRITING, REMOVING, DAMAGED = ".writing-", ".removing-", "damaged-"


class Draft(NamedTuple):
    """A checkpoint that is being written, in a hidden folder."""

    run: Path
    step: int
    folder: Path


def begin(storage: Storage, run: Path, step: int) -> Draft:
    _make_run_folder(storage, run)
    if step_of(run.name) is not None and MANIFEST in storage.names(run):
        raise CheckpointError(f"{run} is a checkpoint, which is never written again; save to its run, {run.parent}")
    newest = max(committed(storage, run), default=-1)
    if step <= newest:
        raise CheckpointError(
            f"{run / step_name(newest)} is committed, and step {step} would overwrite it or stand behind it, so "
            f"that load({str(run)!r}) would not take it; save to another folder, or move that one away"
        )
    try:
        clean(storage, run)
    except CheckpointError as error:  # a file that someone keeps open on a network disk must not stop all saves
        LOG.warning("leftovers stay: %s", error)
    draft = Draft(run, step, run / f"{WRITING}{step_name(step)}-{secrets.token_hex(4)}")
    storage.make_folder(draft.folder)
    return draft


def commit(storage: Storage, draft: Draft, manifest: Manifest) -> Path:
    """The folder of the checkpoint, which is there for good."""
    text = manifest.to_json()
    seen = set(storage.names(draft.folder))
    for file in manifest.files:
        found = storage.size(draft.folder / file.name) if file.name in seen else None
        if found != file.bytes:
            raise CheckpointError(
                f"{draft.folder / file.name} was written with {file.bytes:,} bytes, but rank 0 sees "
                f"{'no such file' if found is None else f'{found:,} bytes'}; all ranks must see the same folder"
            )
    with storage.create(draft.folder / MANIFEST) as out:
        out.write(memoryview(text))
        out.finish()
    storage.sync_folder(draft.folder)
    final = draft.run / step_name(draft.step)
    storage.rename(draft.folder, final)
    storage.sync_folder(draft.run)
    return final


def retain(storage: Storage, run: Path, keep: int | None) -> None:
    """Removes all but the newest `keep`; to be called when the newest is committed."""
    for step in committed(storage, run)[: -keep if keep else 0]:
        hidden = run / f"{REMOVING}{step_name(step)}-{secrets.token_hex(4)}"
        storage.rename(run / step_name(step), hidden)
        storage.sync_folder(run)  # else power loss could leave a checkpoint with its name and without its files
        remove_all(storage, hidden)


def clean(storage: Storage, run: Path) -> None:
    """Removes what saves and removals left that died."""
    for name in storage.names(run):
        if name.startswith(WRITING):  # out of the way first: should its writer live after all, it cannot commit it now
            hidden = run / f"{REMOVING}{name.removeprefix('.')}"
            storage.rename(run / name, hidden)
            remove_all(storage, hidden)
        elif name.startswith(REMOVING):
            remove_all(storage, run / name)


def set_aside(storage: Storage, run: Path, step: int) -> Path:
    """Gives a damaged checkpoint another name, so that it is no longer the newest and its step can be saved again."""
    aside = run / f"{DAMAGED}{step_name(step)}-{secrets.token_hex(4)}"
    storage.rename(run / step_name(step), aside)
    storage.sync_folder(run)
    return aside


def _make_run_folder(storage: Storage, run: Path) -> None:
    """Makes the run's folder and those above it. Each one's name is made to last before anything is put in it; so is
    that of the deepest one that was there: whoever made it may have died before."""
    there = run.absolute()
    missing = []
    while not storage.exists(there):
        missing.append(there)
        there = there.parent
    try:
        storage.sync_folder(there.parent)
    except CheckpointError as error:
        if not isinstance(error.__cause__, PermissionError):  # a folder that we may not even read, we did not make
            raise
    for folder in reversed(missing):
        storage.make_folder(folder)
        storage.sync_folder(folder.parent)
