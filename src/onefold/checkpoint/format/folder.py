"""The folders of checkpoints: their names, their manifests, which one of a run is the newest, and drafts of folders and
files that are there whole or not at all."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onefold.checkpoint.format.manifest import MANIFEST_BYTES_LIMIT, Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.errors import CheckpointDamaged, CheckpointError

MANIFEST = "manifest.json"
REPLACED = ".replaced-"  # begins the name of a checkpoint while another takes its place
STEP = re.compile(r"step-([0-9]{8,18})")


def step_name(step: int) -> str:
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint's folder; None for any other name."""
    match = STEP.fullmatch(name)
    step = int(match[1]) if match else -1
    return step if name == step_name(step) else None


def committed(storage: Storage, run: Path) -> list[int]:
    """The steps of all committed checkpoints, oldest first."""
    return sorted(committed_names(storage, run))


def committed_names(storage: Storage, run: Path) -> dict[int, str]:
    """The folder of every committed checkpoint, by its step. A checkpoint that is being replaced has a hidden name
    until the new one has its name."""
    names = storage.names(run)
    hidden = {step: name for name in names if (step := replaced_step(name)) is not None}
    named = {step: name for name in names if (step := step_of(name)) is not None}
    there: dict[int, str] = {}

    def look(step: int) -> None:
        if storage.is_committed(run / named[step] / MANIFEST):
            there[step] = named[step]

    storage.each(look, named)
    return hidden | there


def replaced_step(name: str) -> int | None:
    """The step of a committed checkpoint that is being replaced; None for any other name."""
    return step_of(name.removeprefix(REPLACED).rpartition("-")[0]) if name.startswith(REPLACED) else None


def read_manifest(storage: Storage, folder: Path) -> Manifest:
    return Manifest.from_json(manifest_text(storage, folder), str(folder / MANIFEST))


def manifest_text(storage: Storage, folder: Path) -> bytes:
    """The manifest as it was written, unchecked but for its size."""
    path = folder / MANIFEST
    if MANIFEST not in storage.names(folder):
        raise CheckpointDamaged(f"{folder} has no {MANIFEST}; it is no checkpoint, or not all of one")
    size = storage.size(path)
    if size > MANIFEST_BYTES_LIMIT:
        raise CheckpointDamaged(f"{path} has {size:,} bytes; at most {MANIFEST_BYTES_LIMIT:,} are read")
    text = bytearray(size)
    storage.read(path, 0, memoryview(text))
    return bytes(text)


def find(storage: Storage, path: Path) -> list[Path]:
    """The checkpoints that a path names: all in a folder of checkpoints, newest first, or the path itself if it is
    one."""
    if not storage.is_folder(path):
        raise CheckpointError(f"{path} is no folder; wanted is a folder of checkpoints, or one step-… in it")
    found = committed_names(storage, path)
    if MANIFEST in storage.names(path) and not found:
        return [path]
    if not found:
        raise CheckpointError(
            f"{path} holds no committed checkpoint: no folder step-… and no {MANIFEST}{_further_in(storage, path)}"
        )
    return [path / found[step] for step in sorted(found, reverse=True)]


def _further_in(storage: Storage, path: Path) -> str:
    """A hint for the error: a subfolder that has checkpoints, as in the folders that `onefold train` makes."""
    for name in storage.names(path) if storage.renames else ():  # in a store there may be very many
        with suppress(CheckpointError):  # a folder that this user may not read
            if storage.is_folder(path / name) and committed(storage, path / name):
                return f"; there are some in {path / name}"
    return ""


def remove_all(storage: Storage, path: Path) -> None:
    """Removes a folder and its contents. Links are removed, not followed."""
    if storage.is_link(path) or not storage.is_folder(path):
        storage.remove(path)
        return
    for name in storage.names(path):
        remove_all(storage, path / name)
    storage.remove_folder(path)


@contextmanager
def drafted(storage: Storage, target: Path) -> Iterator[Path]:
    """Gives the path for a draft, a file or a folder. It takes the name of the target when the block ends, and is
    removed if the block raises: what other programs find under that name is complete. A store has no renames: there the
    block is given the target itself, and must write last what makes it complete."""
    if not storage.renames:
        with _removed_if_it_fails(storage, target):
            yield target
        return
    draft = target.with_name(f".writing-{target.name}-{secrets.token_hex(4)}")
    with _removed_if_it_fails(storage, draft):
        yield draft
        storage.rename(draft, target)
    storage.sync_folder(target.parent)


@contextmanager
def _removed_if_it_fails(storage: Storage, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        with suppress(CheckpointError):
            remove_all(storage, path)
        raise
