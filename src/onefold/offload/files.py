"""Unnamed files: they take disk space while a process has them open, and none after it ends, however it ends.

So nothing is left behind, and nothing can be mistaken for a checkpoint. Space is reserved when a file is made or grows,
so that the disk does not fill up in the middle of a run. Where the file system supports O_DIRECT, transfers bypass the
page cache; elsewhere their pages are dropped from the cache at once, so that host memory stays free.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from onefold.errors import ConfigError, OffloadError
from onefold.offload.host_memory import ALIGN, bytes_of, host_bytes, size_text

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS)  # the file system lacks a feature
REMEDIES = {
    errno.ENOSPC: "free space there, or choose a folder on a larger disk",
    errno.EDQUOT: "free space there, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another file system",
    errno.EIO: "the disk may be failing: see the kernel's log, and choose a folder on another one",
    errno.EBADF: "something in this process closed a file that was not its own",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOENT: "nobody may remove that folder while the run goes on",
}

Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


def check_folder(path: Path, needed_bytes: int) -> None:
    """Raises unless `path` is a folder in which this process can make files and so many bytes are free."""
    try:
        if not path.is_dir():
            found = "is a file" if path.exists() else "does not exist"
            raise ConfigError(f"the path for state on disk, {path}, {found}; give a folder on a fast local disk")
        os.close(nameless(path, direct=False))
        room = os.statvfs(path)
    except OSError as error:
        if error.errno in FORBIDDEN:
            raise ConfigError(
                f"nothing can be written to the path for state on disk, {path}: {error.strerror}; choose a folder in "
                f"which this user may make files"
            ) from error
        raise explained(error, f"make a file in {path}") from error
    found_bytes = room.f_bavail * room.f_frsize
    if needed_bytes > found_bytes:
        raise no_room(path, needed_bytes, found_bytes)


def no_room(path: str | Path, needed_bytes: int, found_bytes: int) -> OffloadError:
    return OffloadError(
        f"state on disk needs {size_text(needed_bytes)}, but {path} has {size_text(found_bytes)} left; "
        f"{REMEDIES[errno.ENOSPC]}"
    )


def disk_share(path: str | Path) -> int:
    """Bytes that this rank may write to files in a folder: its part of what is free there; 0 if there is no folder."""
    try:
        room = os.statvfs(Path(path).expanduser().absolute())
    except OSError:
        return 0  # check_folder says what is wrong
    return room.f_bavail * room.f_frsize // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def supports_direct(path: Path) -> bool:
    """Whether files there can bypass the page cache: tried out, since some file systems refuse only the first read or
    write."""
    block, file = host_bytes(ALIGN, pinned=False), None
    try:
        file = nameless(path, direct=True)
        return all(transfer(move, file, bytes_of(block), 0) for move in (os.pwritev, os.preadv))
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise explained(error, f"write a first block to {path}") from error
    finally:
        if file is not None:
            os.close(file)


def nameless(folder: Path, *, direct: bool) -> int:
    """A new unnamed file, open for reading and writing."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        file = os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        path = folder / f".onefold-{secrets.token_hex(8)}"
        file = os.open(path, flags | os.O_CREAT, 0o600)
        os.unlink(path)  # a kill between these two lines leaves an empty file
    try:
        if direct:  # only now: a file system that refuses O_DIRECT may have made the file by then
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        os.close(file)
        raise
    return file


def resize(file: int, nbytes: int) -> None:
    """Truncates the file, or extends it by zeros whose disk space is reserved."""
    os.ftruncate(file, nbytes)
    libc = ctypes.CDLL(None, use_errno=True)  # os.posix_fallocate would write to each block where it is unsupported
    while nbytes and libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in UNSUPPORTED:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def transfer(move: Move, file: int, memory: memoryview, offset: int) -> int:
    """Reads or writes all of `memory` at this offset of the file; the number of bytes."""
    done = 0
    while done < len(memory):
        moved = move(file, [memory[done:]], offset + done)
        if moved < ALIGN:  # only at the end of the file
            raise OSError(f"it ends at byte {offset + done + moved:,}; something cut it short")
        done += moved - moved % ALIGN  # O_DIRECT needs aligned offsets
    return done


def drop_from_cache(file: int, written: bool) -> None:
    """Drops the file's pages from the page cache, after writing them to disk."""
    if written:
        os.fdatasync(file)  # only clean pages can be dropped; and a network disk reports only now that it is full
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def explained(error: BaseException, doing: str) -> OffloadError:
    """An OffloadError that says what could not be done, the system's reason, and the remedy."""
    if isinstance(error, OSError):
        remedy = REMEDIES.get(error.errno or 0, "choose a folder on another disk or file system")
        explained = OffloadError(f"could not {doing}: {error.strerror or error}; {remedy}")
    else:
        explained = OffloadError(f"could not {doing}: {error!r}; that is a mistake in Onefold: please report it")
    explained.__cause__ = error.with_traceback(None)  # the traceback's frames hold the buffer
    return explained
