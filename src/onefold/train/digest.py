"""What the data are, by content: SHA-256 of every file, of the tokenizer and of the tokens.

Files are hashed once per node and start. What was hashed is kept in the cache under the files' inodes, sizes and times
(of change too, which a program cannot set), so that a later start, or the next stage of a comparison, does not read
files again that nobody wrote to.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onefold.errors import ConfigError, OnefoldError
from onefold.tiers.memory import bytes_of
from onefold.train.cache import Cache
from onefold.train.source import Source, unreadable

PIECE_BYTES = 1 << 20
SETTLED_NS = 2 * 10**9  # a file that was written later than so long ago may change again within one tick of its clock


class FileDigest(NamedTuple):
    """One file of the data."""

    name: str  # after --data
    size: int
    sha256: str


class Digests(NamedTuple):
    """All that a run is trained on."""

    files: tuple[FileDigest, ...]
    tokenizer: str  # SHA-256 of its file, or "bytes"; "" for token files
    tokens: str  # SHA-256 of the tokens made of text; "" for token files

    @property
    def all(self) -> str:
        """One digest for all of it."""
        lines = [f"{file.sha256} {file.name}" for file in self.files]
        return _sha256("\n".join([self.tokenizer, self.tokens, *lines]))

    @property
    def text(self) -> str:
        """Of what tokens are made of: files in their order, whatever their names, and the tokenizer."""
        return _sha256("\n".join([self.tokenizer, *(file.sha256 for file in self.files)]))

    def to_json(self) -> str:
        files = [{"path": file.name, "bytes": file.size, "sha256": file.sha256} for file in self.files]
        named = {"digest": self.all, "tokenizer_sha256": self.tokenizer, "tokens_sha256": self.tokens}
        return json.dumps({**named, "files": files}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Digests | None:
        """What a run wrote down; None if it cannot be read."""
        try:
            known = json.loads(path.read_bytes())
            files = tuple(FileDigest(file["path"], file["bytes"], file["sha256"]) for file in known["files"])
            return cls(files, known["tokenizer_sha256"], known["tokens_sha256"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None


def hash_files(source: Source, given_cache: Path | None) -> tuple[FileDigest, ...]:
    """Each file of the data by content, from the cache where nobody has written to any since."""
    cache: Cache | None = None
    with suppress(OnefoldError):  # token files need none
        cache = Cache(given_cache)
    began_ns, known = time.time_ns(), [_status(path) for path in source.files]
    name = (
        _sha256("\n".join(f"{p.absolute()} {_mark(s)}" for p, s in zip(source.files, known, strict=True))) + ".sha256"
    )
    found = cache.find(name) if cache else None
    if found is not None:
        hashes = bytes(bytes_of(found.body)).decode().split()
    else:
        hashes = [_hash(path, status) for path, status in zip(source.files, known, strict=True)]
        if cache and all(max(s.st_mtime_ns, s.st_ctime_ns) < began_ns - SETTLED_NS for s in known):
            with suppress(OnefoldError):
                cache.write(name, ["\n".join(hashes).encode()])
    found_files = zip(source.files, known, hashes, strict=True)
    return tuple(FileDigest(source.name_of(path), status.st_size, sha256) for path, status, sha256 in found_files)


def read_pieces(path: Path, wanted: str) -> Iterator[bytes]:
    """A file, a piece at a time; raises at its end if it is not the one that was hashed."""
    sha256 = hashlib.sha256()
    for piece in _pieces(path):
        sha256.update(piece)
        yield piece
    if sha256.hexdigest() != wanted:
        raise ConfigError(f"--data: {path} changed while it was read; start again when nobody writes to it")


def _hash(path: Path, status: os.stat_result) -> str:
    sha256 = hashlib.sha256()
    for piece in _pieces(path):
        sha256.update(piece)
    if _mark(_status(path)) != _mark(status):
        raise ConfigError(f"--data: {path} changed while it was read; start again when nobody writes to it")
    return sha256.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        error.filename = path
        unreadable(error)


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        unreadable(error)


def _mark(status: os.stat_result) -> str:
    """Differs once somebody wrote to the file."""
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
