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
from onefold.settings.limited import read_json
from onefold.train.run.cache import Cache
from onefold.train.run.source import Source, unreadable

PIECE_BYTES = 1 << 20
# files changed within the last 2 s are not cached: a further write in the same clock tick would not show
SETTLED_NS = 2 * 10**9
Statuses = dict[Path, os.stat_result]


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
    def run_digest(self) -> str:
        """Digest of all data of a run: tokenizer, tokens, file contents and names."""
        lines = [f"{file.sha256} {file.name}" for file in self.files]
        return _sha256("\n".join([self.tokenizer, self.tokens, *lines]))

    @property
    def cache_key(self) -> str:
        """Digest of the token cache key: tokenizer and file contents in order, without names."""
        return _sha256("\n".join([self.tokenizer, *(file.sha256 for file in self.files)]))

    def to_json(self) -> str:
        files = [{"path": file.name, "bytes": file.size, "sha256": file.sha256} for file in self.files]
        named = {"digest": self.run_digest, "tokenizer_sha256": self.tokenizer, "tokens_sha256": self.tokens}
        return json.dumps({**named, "files": files}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Digests | None:
        """What a run wrote down; None if it cannot be read."""
        try:
            known = read_json(path)
            rows = ((file["path"], file["bytes"], file["sha256"]) for file in known["files"])
            files = tuple(FileDigest(str(name), int(size), str(sha256)) for name, size, sha256 in rows)
            return cls(files, str(known["tokenizer_sha256"]), str(known["tokens_sha256"]))
        except (OSError, OnefoldError, ValueError, TypeError, KeyError, OverflowError):
            return None


def hash_files(source: Source, given_cache: Path | None) -> tuple[FileDigest, ...]:
    """Each file of the data by content, from the cache where nobody has written to any since."""
    cache: Cache | None = None
    with suppress(OnefoldError):  # token files need none
        cache = Cache(given_cache)
    statuses = {path: _status(path) for path in source.files}
    hashes = _cached_hashes(cache, statuses) if cache else _hash_all(statuses)
    found = zip(statuses.items(), hashes, strict=True)
    return tuple(FileDigest(source.name_of(path), status.st_size, sha256) for (path, status), sha256 in found)


def _cached_hashes(cache: Cache, statuses: Statuses) -> list[str]:
    """The hashes that the cache holds for these files as they are now; else they are computed and kept there."""
    began_ns = time.time_ns()
    name = _sha256("\n".join(f"{path.absolute()} {_mark(status)}" for path, status in statuses.items())) + ".sha256"
    if (found := cache.find(name)) is not None:
        return found.text().split()
    hashes = _hash_all(statuses)
    if all(max(status.st_mtime_ns, status.st_ctime_ns) < began_ns - SETTLED_NS for status in statuses.values()):
        with suppress(OnefoldError):
            cache.write(name, ["\n".join(hashes).encode()])
    return hashes


def _hash_all(statuses: Statuses) -> list[str]:
    return [_hash(path, status) for path, status in statuses.items()]


def read_pieces(path: Path, wanted: str) -> Iterator[bytes]:
    """A file, a piece at a time; raises at its end if it is not the one that was hashed."""
    sha256 = hashlib.sha256()
    yield from _pieces(path, sha256)
    if sha256.hexdigest() != wanted:
        raise _changed(path)


def _hash(path: Path, status: os.stat_result) -> str:
    sha256 = hashlib.sha256()
    for _ in _pieces(path, sha256):
        pass
    if _mark(_status(path)) != _mark(status):
        raise _changed(path)
    return sha256.hexdigest()


def _changed(path: Path) -> ConfigError:
    return ConfigError(f"--data: {path} changed while it was read; start again when nobody writes to it")


def _pieces(path: Path, sha256: hashlib._Hash) -> Iterator[bytes]:
    """A file, a piece at a time; each piece is hashed before it is yielded."""
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                sha256.update(piece)
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
