"""The only caller of the file system. Each method is one operation, so a test can log, drop, tear or fail any of them.

What is written is on disk for good only after `Out.finish` (the bytes) and `sync_folder` (the name). An operation that
fails raises CheckpointError: what was tried, on which path, and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onefold.errors import CheckpointDamaged, CheckpointError

SYNC_FILE_RANGE_WRITE = 2
WORTH_BYTES = 1 << 20

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # the disk itself says the bytes are gone
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class Storage:
    """The local or shared file system."""

    def at(self, operation: str, path: Path) -> None:
        """Called before each operation; a test fails, counts or stops here."""

    def make_folder(self, path: Path) -> None:
        with self._told("make_folder", path):
            os.mkdir(path)

    def create(self, path: Path) -> Out:
        """A new file; one that is there already is never touched."""
        with self._told("create", path):
            return Out(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def sync_folder(self, path: Path) -> None:
        """What was made, renamed and removed in this folder stays so after power loss."""
        with self._told("sync_folder", path):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that knows no fsync of folders
                    raise
            finally:
                os.close(folder)

    def rename(self, old: Path, new: Path) -> None:
        with self._told("rename", old):
            os.rename(old, new)

    def remove(self, path: Path) -> None:
        with self._told("remove", path):
            os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """An empty one."""
        with self._told("remove_folder", path):
            os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        with self._told("names", path):
            return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        with self._told("exists", path):
            return _there(os.lstat, path) is not None

    def is_folder(self, path: Path) -> bool:
        with self._told("is_folder", path):
            found = _there(os.stat, path)
            return found is not None and stat.S_ISDIR(found.st_mode)

    def is_link(self, path: Path) -> bool:
        with self._told("is_folder", path):
            return os.path.islink(path)

    def size(self, path: Path) -> int:
        with self._told("size", path):
            return regular(path, os.stat(path)).st_size

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fills `into`, or raises."""
        with self._told("read", path):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
            try:
                regular(path, os.fstat(file))
                filled = 0
                while filled < len(into):
                    got = os.preadv(file, [into[filled:]], offset + filled)
                    if not got:
                        raise ends_early(path, offset + filled, offset + len(into))
                    filled += got
            finally:
                os.close(file)

    @contextmanager
    def _told(self, operation: str, path: Path) -> Iterator[None]:
        try:
            self.at(operation, path)
            yield
        except OSError as error:
            raise explained(operation, path, error) from error
        except ValueError as error:  # a name that no file can have: with a NUL, or of characters that are none
            raise CheckpointError(f"could not {VERBS[operation]} {path}: {error}") from error


def _there(look: Callable[[Path], os.stat_result], path: Path) -> os.stat_result | None:
    """None if nothing is there; raises where that cannot be told, as in a folder that this user may not search."""
    try:
        return look(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # links that lead to each other lead to nothing
            return None
        raise


class Out:
    """A new file, written once from front to back. Leaving the `with` block closes it; only `finish` makes it last."""

    def __init__(self, storage: Storage, path: Path, file: int) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, data: memoryview) -> None:
        with self._storage._told("write", self._path):
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            start_writeback(self._file, len(data))

    def finish(self) -> None:
        """All bytes are on disk for good; the name is not yet."""
        with self._storage._told("finish", self._path):
            os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __enter__(self) -> Out:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_writeback(file: int, size: int) -> None:
    """Let the disk begin with what was written last, so that less is left for the flush. A hint: it may do nothing."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; Python has no name for it
    if begin is not None and size >= WORTH_BYTES:
        end = os.lseek(file, 0, os.SEEK_CUR)
        begin(file, ctypes.c_int64(end - size), ctypes.c_int64(size), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))


VERBS = {
    "make_folder": "make the folder", "create": "create", "write": "write", "finish": "flush to disk",
    "sync_folder": "flush to disk the folder", "rename": "rename", "remove": "remove",
    "remove_folder": "remove the folder", "names": "list", "exists": "look for", "is_folder": "look for",
    "size": "look at", "read": "read",
}  # fmt: skip


def explained(operation: str, path: Path, error: OSError) -> CheckpointError:
    """What the system said, in our words."""
    if error.errno in FULL:
        remedy = "; free space there, save elsewhere, or keep fewer checkpoints (keep=)"
    elif error.errno in FORBIDDEN:
        remedy = "; choose a folder that this user may read and write"
    elif error.errno == errno.ENOENT and operation in ("create", "read", "size"):
        remedy = "; all ranks must see the same folder, and nobody may change it meanwhile"
    elif error.errno == errno.ENOENT and operation == "make_folder":
        remedy = "; make the folder above it first"
    else:
        remedy = ""
    kind = CheckpointDamaged if operation == "read" and error.errno in UNREADABLE else CheckpointError
    return kind(f"could not {VERBS[operation]} {path}: {error.strerror or error}{remedy}")


def regular(path: Path, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamaged(f"{path} is a folder, pipe or device; wanted is a plain file")
    return status


def ends_early(path: Path, found: int, wanted: int) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} ends at byte {found:,}, but byte {wanted:,} was wanted; it was cut short")
