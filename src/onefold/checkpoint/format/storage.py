"""The file operations of checkpoints. Each method is one operation, so a test can log, drop, tear or fail any of them.

What is written survives a power loss only after `Out.finish` (the bytes) and `sync_folder` (the name). An operation
that fails raises CheckpointError: what was tried, on which path, and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from onefold.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")

SYNC_FILE_RANGE_WRITE = 2
WORTH_BYTES = 1 << 20

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # the disk reports that the bytes are lost
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class Storage:
    """The local or shared file system. Object stores are another: format/remote.py."""

    renames = True  # a folder gets the name of a checkpoint once all of it is written; else its manifest is put last

    def at(self, operation: str, path: Path) -> None:
        """Called before each operation; tests override it to count operations or make them fail."""

    def make_folder(self, path: Path) -> None:
        with self._explaining_errors("make_folder", path):
            os.mkdir(path)

    def create(self, path: Path, size: int | None = None) -> Out:
        """Creates a new file; raises if it exists. `size` is how many bytes will be written, where that is known."""
        with self._explaining_errors("create", path):
            return Out(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def sync_folder(self, path: Path) -> None:
        """Makes what was created, renamed and removed in this folder survive a power loss."""
        with self._explaining_errors("sync_folder", path):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without fsync of folders
                    raise
            finally:
                os.close(folder)

    def rename(self, old: Path, new: Path) -> None:
        with self._explaining_errors("rename", old):
            os.rename(old, new)

    def remove(self, path: Path) -> None:
        with self._explaining_errors("remove", path):
            os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        with self._explaining_errors("remove_folder", path):
            os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        with self._explaining_errors("names", path):
            return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        with self._explaining_errors("exists", path):
            return _there(os.lstat, path) is not None

    def is_folder(self, path: Path) -> bool:
        with self._explaining_errors("is_folder", path):
            found = _there(os.stat, path)
            return found is not None and stat.S_ISDIR(found.st_mode)

    def is_link(self, path: Path) -> bool:
        with self._explaining_errors("is_folder", path):
            return os.path.islink(path)

    def size(self, path: Path) -> int:
        with self._explaining_errors("size", path):
            return regular(path, os.stat(path)).st_size

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fills `into`, or raises."""
        with self._explaining_errors("read", path):
            # NONBLOCK: opening a pipe would wait for its writer.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        """Calls `act` for each item, to read a range or to look for a file; where that helps, for several at once."""
        for item in items:
            act(item)

    def is_committed(self, manifest: Path) -> bool:
        """Whether the folder of this manifest, which has the name of a checkpoint, is one. A renamed folder is, and is
        damaged if it has no manifest."""
        return True

    def check_access(self, path: Path) -> None:
        """Raises if it is known before a save that this path cannot be reached."""

    @contextmanager
    def _explaining_errors(self, operation: str, path: Path) -> Iterator[None]:
        """Runs one operation; its OSError becomes a CheckpointError with the operation, the path and the remedy."""
        try:
            self.at(operation, path)
            yield
        except OSError as error:
            raise explained(operation, path, error) from error
        except ValueError as error:  # an impossible file name: with a NUL, or with lone surrogates
            raise CheckpointError(f"could not {VERBS[operation]} {path}: {error}") from error


def _there(look: Callable[[Path], os.stat_result], path: Path) -> os.stat_result | None:
    """The status of a path; None if it does not exist. Raises if that cannot be known, as without permission."""
    try:
        return look(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a cycle of links
            return None
        raise


class Out:
    """A new file, written once from start to end. Leaving the `with` block closes it; only `finish` flushes it."""

    def __init__(self, storage: Storage, path: Path, file: int) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, data: memoryview) -> None:
        with self._storage._explaining_errors("write", self._path):
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            start_writeback(self._file, len(data))

    def finish(self) -> None:
        """Flushes the bytes to disk (fsync); the file's name may still be lost until `sync_folder`."""
        with self._storage._explaining_errors("finish", self._path):
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
    """Starts to write the last bytes to disk, so that the final flush has less to do. A hint: it may do nothing."""
    if size < WORTH_BYTES:
        return
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; Python has no name for it
    if begin is not None:
        end = os.lseek(file, 0, os.SEEK_CUR)
        begin(file, ctypes.c_int64(end - size), ctypes.c_int64(size), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))


VERBS = {
    "make_folder": "make the folder", "create": "create", "write": "write", "finish": "flush to disk",
    "sync_folder": "flush to disk the folder", "rename": "rename", "remove": "remove",
    "remove_folder": "remove the folder", "names": "list", "exists": "look for", "is_folder": "look for",
    "size": "look at", "read": "read",
}  # fmt: skip


def explained(operation: str, path: Path, error: OSError) -> CheckpointError:
    """A CheckpointError that says what was tried, the system's reason, and the remedy."""
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
