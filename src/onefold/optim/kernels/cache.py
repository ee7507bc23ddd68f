"""The cache of compiled libraries, in a folder that only this user may write.

Loading a library runs its code, so nothing is loaded that another user could have written. The folder and each file are
opened without following a link, checked by their descriptor, and loaded through that descriptor, so that nobody can
replace the file between the check and the load.

An unfinished file or folder is named making-… and locked by its process. The lock ends with the process, so a later
process recognises what a killed one left behind, and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onefold.settings.trust import OTHERS_WRITE, why_untrusted

MAKING = "making-"
LEFT = re.compile(rf"{MAKING}(onefold-)?[0-9a-f]{{16}}")
LIBRARY_BYTES_LIMIT = 64 << 20  # ours have some 100 kB
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotOurs(OSError):
    """A folder or file that another user could have written; the message says why."""


def cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "onefold"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the folder, which is made if it does not exist. If it is this user's and others may write to it,
    their permission is removed; raises NotOurs for any other folder that others may write."""
    for folder in (*reversed(path.parents), path):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    try:
        found = os.open(path, FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOurs(f"{path} is a link or no folder") from error
        raise
    try:
        status = os.fstat(found)
        if status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
            os.fchmod(found, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)  # files they put there still belong to them
        if why := why_untrusted(os.fstat(found)):
            raise NotOurs(f"{path} is not used: {why}")
        yield found
    finally:
        os.close(found)


def kept(folder: int, stem: str) -> ctypes.CDLL | None:
    """The cached library of this name, loaded, if it is undamaged and no other user could have written it."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith(f"{stem}-") or not name.endswith(".so"):
            continue
        try:
            file = os.open(name, FILE, dir_fd=folder)
        except OSError:  # a link, or removed meanwhile
            continue
        if name == f"{stem}-{digest(content_of(file))}.so":
            return load(file)
        os.close(file)
    return None


def keep(folder: int, stem: str, content: bytes) -> ctypes.CDLL:
    """Caches a library under a name made from its bytes, by writing another name and renaming it; loads it."""
    name = f"{stem}-{digest(content)}.so"
    draft = f"{MAKING}{secrets.token_hex(8)}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(content)
        whole = os.open(draft, FILE, dir_fd=folder)  # read-only: some kernels map no file that is open for writing
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
    finally:
        os.close(file)
    if content_of(whole) != content:
        os.close(whole)
        raise NotOurs(f"{name} changed while it was written")
    return load(whole)


def content_of(file: int) -> bytes:
    """The bytes of a regular file that no other user may write; of any other file, no bytes."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or why_untrusted(status) or status.st_size > LIBRARY_BYTES_LIMIT:
        return b""
    return os.pread(file, status.st_size, 0)


def load(file: int) -> ctypes.CDLL:
    """Loads a library through its descriptor, which stays open: dlopen remembers paths, so /proc/self/fd/N must not be
    another file later."""
    try:
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError:
        os.close(file)
        raise


@contextmanager
def compile_folder() -> Iterator[int]:
    """A new private folder for a compiler; removed afterwards, or by the next call if this process is killed."""
    above = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sweep(above)
        name, folder = _locked(above)
        try:
            if why := why_untrusted(os.fstat(folder)):
                raise NotOurs(f"{name} was exchanged: {why}")
            yield folder
        finally:
            _remove(name, folder, above)
            os.close(folder)
    finally:
        os.close(above)


def _locked(above: int) -> tuple[str, int]:
    """A new folder and its descriptor, locked so that no other process removes it."""
    while True:
        name = f"{MAKING}onefold-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=above)
        with suppress(FileNotFoundError):  # swept before it was locked
            folder = os.open(name, FOLDER, dir_fd=above)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(folder), os.stat(name, dir_fd=above, follow_symlinks=False)):
                    return name, folder
            except FileNotFoundError:
                pass
            os.close(folder)


def sweep(above: int) -> None:
    """Removes what processes of this user left in a folder when they were killed while compiling."""
    for name in os.listdir(above):
        if LEFT.fullmatch(name):  # exactly the names made here: a temporary folder is full of others
            with suppress(OSError):  # another user's, still locked, or being removed by another process
                file = os.open(name, FILE, dir_fd=above)
                try:
                    if os.fstat(file).st_uid == os.geteuid():
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                        _remove(name, file, above)
                finally:
                    os.close(file)


def _remove(name: str, file: int, above: int) -> None:
    """Removes a file, or a folder of files, by its descriptor: never the contents of another folder of that name."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            os.unlink(name, dir_fd=above)
            return
        for inner in os.listdir(file):
            os.unlink(inner, dir_fd=file)
        os.rmdir(name, dir_fd=above)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
