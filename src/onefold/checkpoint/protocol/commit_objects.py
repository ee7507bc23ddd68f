"""The commit of a checkpoint in an object store, all or nothing, without renames. As in commit.py, rank 0 calls these.

    begin    removes what failed saves left; chooses a number that is in the names of all files of this save
    (write)  every rank uploads its file into step-…; an object is there once its upload is complete
    commit   checks all files; puts the manifest, in one request: on the condition that no other save put one meanwhile
    retain   removes the manifest of an older checkpoint, and only then its files

So a checkpoint is there if its manifest is, and everything that the manifest names was there before. A save that
replaces a checkpoint writes files of other names beside the old ones, puts its manifest over the old one, and then
removes the old files. What a save that died has left is in no manifest; the next save removes it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onefold.checkpoint.format.folder import MANIFEST, committed, read_manifest, step_name, step_of
from onefold.checkpoint.format.manifest import FILE_NAME, Manifest
from onefold.checkpoint.format.remote import RemoteStorage
from onefold.checkpoint.protocol.draft import Draft, check_order, check_size
from onefold.errors import CheckpointDamaged, CheckpointError

LOG = logging.getLogger("onefold")


def begin(storage: RemoteStorage, run: Path, step: int, *, overwrite: bool) -> Draft:
    steps = check_order(storage, run, step, overwrite=overwrite)
    try:
        clean(storage, run, steps)
    except CheckpointError as error:  # a store that forbids removing must not stop all saves
        LOG.warning("files of an earlier save that failed could not be removed: %s", error)
    folder = run / step_name(step)
    replaces = storage.version(folder / MANIFEST) if step in steps else None
    return Draft(run, step, folder, secrets.token_hex(4), replaces)


def commit(storage: RemoteStorage, draft: Draft, manifest: Manifest) -> Path:
    found = storage.sizes(draft.folder)
    for file in manifest.files:
        check_size(draft, file, found.get(file.name))
    if draft.replaces is not None and _same(storage, draft, manifest):
        for file in manifest.files:
            storage.remove(draft.folder / file.name)
        return draft.folder
    storage.publish(draft.folder / MANIFEST, manifest.to_json(), draft.replaces)
    if draft.replaces is not None:
        try:
            _remove_others(storage, draft.folder, manifest)
        except CheckpointError as error:  # the checkpoint is committed; the next save tries again
            LOG.warning("files of the checkpoint that was replaced could not be removed: %s", error)
    return draft.folder


def _same(storage: RemoteStorage, draft: Draft, manifest: Manifest) -> bool:
    """Whether the checkpoint that is there has the content of this one: all but the number in its files' names."""
    try:
        old = read_manifest(storage, draft.folder)
    except CheckpointDamaged:
        return False
    names = dict(zip((file.name for file in manifest.files), (file.name for file in old.files)))
    files = tuple(file._replace(name=names.get(file.name, file.name)) for file in manifest.files)
    entries = tuple(entry._replace(file=names.get(entry.file, entry.file)) for entry in manifest.entries)
    return replace(manifest, files=files, entries=entries).to_json() == old.to_json()


def _remove_others(storage: RemoteStorage, folder: Path, manifest: Manifest) -> None:
    """Removes files of other saves in the folder of a committed checkpoint."""
    kept = {file.name for file in manifest.files}
    for name in storage.names(folder):
        if FILE_NAME.fullmatch(name) and name not in kept:
            storage.remove(folder / name)


def retain(storage: RemoteStorage, run: Path, keep: int | None) -> None:
    for step in committed(storage, run)[: -keep if keep else 0]:
        _remove(storage, run / step_name(step))


def _remove(storage: RemoteStorage, folder: Path) -> None:
    storage.remove(folder / MANIFEST)  # from now on it is no checkpoint
    storage.remove_below(folder)


def clean(storage: RemoteStorage, run: Path, steps: Sequence[int] | None = None) -> None:
    """Removes what saves that failed have left; `steps` are those that are committed, where that is known already."""
    steps = committed(storage, run) if steps is None else steps
    for name in storage.names(run):
        step = step_of(name)
        if step is not None and step not in steps:
            storage.remove_below(run / name)
    if steps:
        newest = run / step_name(steps[-1])
        numbers = {match[1] for name in storage.names(newest) if (match := FILE_NAME.fullmatch(name))}
        if len(numbers) > 1:  # a save that was to replace it has failed
            try:
                _remove_others(storage, newest, read_manifest(storage, newest))
            except CheckpointDamaged:
                pass  # nobody knows which files are its own
    storage.abandon_uploads(run)


def set_aside(storage: RemoteStorage, folder: Path, aside: Path) -> Path:
    for name in storage.names(folder):
        storage.copy(folder / name, aside / name)
    _remove(storage, folder)
    return aside
