"""Which copies a node has in its memory, which of their files have the digests of their manifest, and which copy all
nodes together have complete."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.checkpoint.format.folder import MANIFEST, manifest_text
from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.verify import verify
from onefold.checkpoint.memory.peers import COPY, CopyStorage
from onefold.checkpoint.memory.places import DRAFT
from onefold.errors import CheckpointError

LOG = logging.getLogger("onefold")


class LocalCopy(NamedTuple):
    """What this node has of one copy. The digest of the manifest distinguishes copies of one step."""

    digest: str
    text: bytes  # the manifest
    manifest: Manifest
    files: dict[str, Path]

    def storage(self) -> CopyStorage:
        return CopyStorage(self.text, self.manifest, self.files)


class Chosen(NamedTuple):
    """The newest copy that is complete, and which rank has which of its files."""

    digest: str
    step: int
    manifest_bytes: int
    holders: dict[str, tuple[int, ...]]  # file -> ranks that have found it undamaged


def local_copies(folder: Path) -> dict[str, LocalCopy]:
    """The copies in a node's folder, by digest; those with a damaged manifest are left out."""
    storage, found = Storage(), dict[str, LocalCopy]()
    for name in storage.names(folder):
        path = folder / name
        if name.startswith(DRAFT) or not storage.is_folder(path):
            continue
        try:
            text = manifest_text(storage, path)
            manifest = Manifest.from_json(text, str(path / MANIFEST))
            digest = hashlib.sha256(text).hexdigest()
            files = {file: path / file for file in storage.names(path) if file != MANIFEST}
        except CheckpointError as error:
            LOG.warning("a copy in memory is damaged and not used: %s", error)
            continue
        known = found.setdefault(digest, LocalCopy(digest, text, manifest, {}))
        known.files.update(files)
    return found


def undamaged(copies: Iterable[LocalCopy], share: int, shares: int) -> list[list[Any]]:
    """For each copy: digest, step, size of the manifest, number of files, and which of a share of its files here are as
    they were written. Every byte of the share is read."""
    rows = []
    for copy in copies:
        wanted = [file.name for file in copy.manifest.files]
        mine = [name for name in wanted if name in copy.files][share::shares]
        damages = verify(copy.storage(), COPY, only=mine)
        for damage in damages:
            LOG.warning("a copy in memory of step %d is damaged: %s", copy.manifest.step, damage.what)
        bad = {damage.file for damage in damages}
        good = [name for name in mine if name not in bad]
        rows.append([copy.digest, copy.manifest.step, len(copy.text), len(wanted), good])
    return rows


def choose(answers: Sequence[Sequence[Sequence[Any]]]) -> Chosen | None:
    """The newest copy of which every file is undamaged on some rank; None if there is none. `answers` has what
    `undamaged` gave on each rank."""
    holders: dict[str, dict[str, list[int]]] = {}
    about: dict[str, Sequence[Any]] = {}
    for rank, rows in enumerate(answers):
        for row in rows:
            about[row[0]] = row
            for name in row[4]:
                holders.setdefault(row[0], {}).setdefault(name, []).append(rank)
    complete = [(row[1], digest) for digest, row in about.items() if len(holders.get(digest, {})) == row[3]]
    if not complete:
        return None
    step, digest = max(complete)
    return Chosen(digest, step, about[digest][2], {name: tuple(ranks) for name, ranks in holders[digest].items()})


def readable_by(chosen: Chosen, nodes: Sequence[str]) -> Mapping[int, set[str]]:
    """For each rank the files that it can read itself, because a rank of its node has found them undamaged."""
    here = {
        node: {name for name, ranks in chosen.holders.items() if any(nodes[rank] == node for rank in ranks)}
        for node in set(nodes)
    }
    return {rank: here[node] for rank, node in enumerate(nodes)}
