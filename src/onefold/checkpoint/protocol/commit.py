"""The commit of a checkpoint, all or nothing. Rank 0 calls these functions; they do not communicate.

In object stores, which do not rename, another protocol does the same: commit_objects.py. On file systems:

    begin    makes the run's folder, flushed; removes what failed saves left; makes a hidden folder
    (write)  every rank writes and flushes its file there
    commit   checks all files; writes and flushes the manifest and the folder; renames it; flushes the run's folder
    retain   renames an older checkpoint to a hidden name, flushes that, and only then deletes it

So a folder named step-… is complete at any instant and after any power loss, and is never written again. The newest is
the one with the highest step; no file points to it. A save that replaces a checkpoint renames the old one first, to a
hidden name by which it is found until the new one has its place, and deletes it last: at any instant one of them is
there.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from onefold.checkpoint.format.folder import (
    MANIFEST,
    REPLACED,
    committed,
    remove_all,
    replaced_step,
    step_name,
)
from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.remote import RemoteStorage
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol import commit_objects
from onefold.checkpoint.protocol.draft import Draft, check_order, check_size
from onefold.errors import CheckpointError

LOG = logging.getLogger("onefold")

WRITING, REMOVING, DAMAGED = ".writing-", ".removing-", "damaged-"


def begin(storage: Storage, run: Path, step: int, *, overwrite: bool = False) -> Draft:
    if isinstance(storage, RemoteStorage):
        return commit_objects.begin(storage, run, step, overwrite=overwrite)
    _make_run_folder(storage, run)
    check_order(storage, run, step, overwrite=overwrite)
    try:
        clean(storage, run)
    except CheckpointError as error:  # a file that is open on a network disk must not stop all saves
        LOG.warning("files of an earlier save that failed could not be removed: %s", error)
    draft = Draft(run, step, run / f"{WRITING}{step_name(step)}-{secrets.token_hex(4)}")
    storage.make_folder(draft.folder)
    return draft


def commit(storage: Storage, draft: Draft, manifest: Manifest) -> Path:
    """Commits a checkpoint whose files all ranks have written; its folder. One that was to be replaced and is the same,
    byte for byte, stays."""
    if isinstance(storage, RemoteStorage):
        return commit_objects.commit(storage, draft, manifest)
    text = manifest.to_json()
    seen = set(storage.names(draft.folder))
    for file in manifest.files:
        check_size(draft, file, storage.size(draft.folder / file.name) if file.name in seen else None)
    with storage.create(draft.folder / MANIFEST) as out:
        out.write(memoryview(text))
        out.finish()
    storage.sync_folder(draft.folder)
    final = draft.run / step_name(draft.step)
    there = storage.exists(final)
    if there and _same(storage, final, text):
        remove_all(storage, draft.folder)
        return final
    hidden = draft.run / f"{REPLACED}{step_name(draft.step)}-{secrets.token_hex(4)}"
    if there:
        storage.rename(final, hidden)
        storage.sync_folder(draft.run)
    storage.rename(draft.folder, final)
    storage.sync_folder(draft.run)
    if there:
        _remove(storage, hidden)
    return final


def _same(storage: Storage, folder: Path, text: bytes) -> bool:
    """Whether a committed checkpoint has this manifest, which has the digests of all that is in its files."""
    path = folder / MANIFEST
    if MANIFEST not in storage.names(folder) or storage.size(path) != len(text):
        return False
    found = bytearray(len(text))
    storage.read(path, 0, memoryview(found))
    return bytes(found) == text


def _put_back(storage: Storage, run: Path) -> None:
    """Gives a checkpoint its name back whose replacement did not come, because its process died."""
    for name in storage.names(run):
        step = replaced_step(name)
        if step is not None and step_name(step) not in storage.names(run):
            storage.rename(run / name, run / step_name(step))
            storage.sync_folder(run)


def _remove(storage: Storage, folder: Path) -> None:
    """Removes a checkpoint with a hidden name, of which no part may be taken for a checkpoint again."""
    hidden = folder.with_name(f"{REMOVING}{folder.name.removeprefix('.')}")
    storage.rename(folder, hidden)
    storage.sync_folder(folder.parent)  # else power loss could leave a checkpoint with its name and without its files
    remove_all(storage, hidden)


def retain(storage: Storage, run: Path, keep: int | None) -> None:
    """Removes all checkpoints but the newest `keep`; to be called after a commit."""
    if isinstance(storage, RemoteStorage):
        return commit_objects.retain(storage, run, keep)
    for step in committed(storage, run)[: -keep if keep else 0]:
        hidden = run / f"{REMOVING}{step_name(step)}-{secrets.token_hex(4)}"
        storage.rename(run / step_name(step), hidden)
        storage.sync_folder(run)  # else power loss could leave a checkpoint with its name and without its files
        remove_all(storage, hidden)


def clean(storage: Storage, run: Path) -> None:
    """Removes what saves and removals left behind when their process died."""
    if isinstance(storage, RemoteStorage):
        return commit_objects.clean(storage, run)
    _put_back(storage, run)
    for name in storage.names(run):
        if name.startswith(WRITING):  # renamed first: if its writer is alive after all, its commit fails
            hidden = run / f"{REMOVING}{name.removeprefix('.')}"
            storage.rename(run / name, hidden)
            remove_all(storage, hidden)
        elif name.startswith(REMOVING):
            remove_all(storage, run / name)
        elif replaced_step(name) is not None:  # and its replacement is there
            _remove(storage, run / name)


def set_aside(storage: Storage, run: Path, step: int) -> Path:
    """Renames a damaged checkpoint, so that it is no longer the newest and its step can be saved again."""
    aside = run / f"{DAMAGED}{step_name(step)}-{secrets.token_hex(4)}"
    if isinstance(storage, RemoteStorage):
        return commit_objects.set_aside(storage, run / step_name(step), aside)
    storage.rename(run / step_name(step), aside)
    storage.sync_folder(run)
    return aside


def _make_run_folder(storage: Storage, run: Path) -> None:
    """Makes the run's folder and its parents. Each name is flushed before anything is put into the folder; also that of
    the deepest folder that exists, whose maker may have died before flushing it."""
    there = run.absolute()
    missing = []
    while not storage.exists(there):
        missing.append(there)
        there = there.parent
    try:
        storage.sync_folder(there.parent)
    except CheckpointError as error:
        # A parent that this user may not read: it was not made here.
        if not isinstance(error.__cause__, PermissionError):
            raise
    for folder in reversed(missing):
        storage.make_folder(folder)
        storage.sync_folder(folder.parent)
