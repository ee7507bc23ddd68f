"""A folder of entries that only this user can read or write: tokenised text, which is a copy of private data.

An entry starts with a header of 128 bytes that holds the SHA-256 of the rest, so that a damaged one is noticed and made
again. It is written into a file without a name, which gets one when it is whole: a process that is killed leaves
nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from onefold.errors import ConfigError, OnefoldError
from onefold.offload.host_memory import bytes_of
from onefold.optim.kernels.cache import cache_folder
from onefold.settings.trust import Untrusted, private_folder, why_untrusted
from onefold.train.run.stored import OpenFile, Stretch, Tokens

HEADER_BYTES = 128  # a multiple of every token's size
HEADER = re.compile(rb"onefold cache 1 ([0-9a-f]{64})\n *\n")
PIECE_BYTES = 1 << 20
UNNAMED = getattr(os, "O_TMPFILE", 0)
NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # of file systems without unnamed files


class Entry(NamedTuple):
    """A whole entry of the cache."""

    sha256: str  # of the body
    file: OpenFile
    size: int  # bytes of the body, which begins behind the header

    def text(self) -> str:
        """All of a small one."""
        body = torch.empty(self.size, dtype=torch.uint8)
        self.file.read(HEADER_BYTES, body)
        return bytes(bytes_of(body)).decode()

    def tokens(self, dtype: torch.dtype) -> Tokens:
        stretch = Stretch(self.file.path, dtype, HEADER_BYTES, self.size // dtype.itemsize)
        return Tokens([stretch], self.file)


class Cache:
    """The folder, made if it is not there; raises unless it is this user's alone.

    A folder that was chosen with --cache is never changed; the default one is put right if this user owns it.
    """

    def __init__(self, given: Path | None) -> None:
        self.folder = given or default_cache()
        self._given = given is not None
        with self._writing(), private_folder(self.folder, lambda mode: mode if self._given else 0o700):
            pass

    def find(self, name: str, *, verify: bool = True) -> Entry | None:
        """The entry, or None where there is none or it must be made again: it is damaged, or others could write it."""
        try:
            opened = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(opened)
            if why := why_untrusted(status):
                if self._given:
                    raise ConfigError(f"{self.folder / name} may hold what others wrote: {why}; remove it")
                return None
            header = os.read(opened, HEADER_BYTES) if stat.S_ISREG(status.st_mode) else b""
            known = HEADER.fullmatch(header)
            if known is None or len(header) < HEADER_BYTES:
                return None
            sha256 = known[1].decode()
            if verify and _sha256_of_rest(opened) != sha256:
                return None
            return Entry(sha256, OpenFile(self.folder / name, opened), status.st_size - HEADER_BYTES)
        finally:
            os.close(opened)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Makes the entry, in place of one that `find` refused."""
        path, sha256 = self.folder / name, hashlib.sha256()
        with self._writing(), draft_of(path) as draft:
            os.lseek(draft, HEADER_BYTES, os.SEEK_SET)
            with os.fdopen(os.dup(draft), "wb") as out:
                for piece in pieces:
                    sha256.update(piece)
                    out.write(piece)
            os.pwrite(draft, f"onefold cache 1 {sha256.hexdigest()}\n".encode().ljust(HEADER_BYTES - 1) + b"\n", 0)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Untrusted as error:
            raise ConfigError(
                f"the cache {self.folder} may hold what others wrote: {error}; give a folder of your own with --cache, "
                f"or chmod go-w it"
            ) from error
        except OSError as error:
            raise OnefoldError(f"the cache {self.folder} cannot be written: {error.strerror}; try --cache") from error


@contextmanager
def draft_of(path: Path) -> Iterator[int]:
    """An open file that becomes `path` if all goes well; until then it has no name, if the file system knows such."""
    try:
        draft = os.open(path.parent, UNNAMED | os.O_RDWR | os.O_CLOEXEC, 0o600) if UNNAMED else -1
    except OSError as error:
        if error.errno not in NO_TMPFILE:
            raise
        draft = -1
    if draft < 0:
        with named_draft_of(path) as draft:
            yield draft
        return
    try:
        yield draft
        try:
            _link(draft, path)
        except FileExistsError:  # `path` exists: a refused entry, or another process's; replace it atomically
            name = path.with_name(_draft_name(path))
            _link(draft, name)
            name.replace(path)
    finally:
        os.close(draft)


@contextmanager
def named_draft_of(path: Path) -> Iterator[int]:
    """For file systems without unnamed files: a draft beside `path`, which stays only if this process is killed."""
    name = path.with_name(_draft_name(path))
    draft = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield draft
        name.replace(path)
    finally:
        os.close(draft)
        name.unlink(missing_ok=True)


def _link(opened: int, path: Path) -> None:
    """Give an unnamed file a name."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # with a folder given, Python calls linkat, which follows the link in /proc to the file
        os.link(f"/proc/self/fd/{opened}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _draft_name(path: Path) -> str:
    return f".{path.name}.{secrets.token_hex(4)}"


def _sha256_of_rest(opened: int) -> str:
    sha256 = hashlib.sha256()
    while piece := os.read(opened, PIECE_BYTES):
        sha256.update(piece)
    return sha256.hexdigest()


def default_cache() -> Path:
    try:
        return cache_folder()
    except RuntimeError as error:
        raise ConfigError("this user has no home, so tokens have no cache; give a folder with --cache") from error
