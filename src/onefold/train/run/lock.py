"""One run at a time in a run folder: a lock that ends with the process that holds it.

The kernel's lock on `.lock` (flock) is gone with its holder, however that ends. Where the file system has no locks, the
file itself is the lock: the process that made it holds it, and on the same host it is seen whether that still runs.
The file says who holds the folder, for the one that comes second. No other user may open it: who can open a file can
lock it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onefold.errors import ConfigError
from onefold.train.run.folder import LOCK, make_folder

LAUNCHED = "ONEFOLD_LIFELINE"  # set for ranks whose launcher holds the lock
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
MOST_BYTES = 1 << 14  # of the file


class RunLock:
    """Held from `with` to its end; raises if another process holds it. The folder is made if it is not there.

    >>> with RunLock(Path("run")):
    ...     pass
    """

    def __init__(self, out: Path) -> None:
        self._out, self._path = out, out / LOCK
        self._opened = -1
        self._made = False

    def __enter__(self) -> RunLock:
        self._made = not self._out.exists()
        make_folder(self._out)
        try:
            self._opened = self._by_kernel() if has_locks(self._out) else lock_by_existence(self._out)
        except OSError as error:
            raise ConfigError(f"--out {self._out} cannot be locked: {error.strerror}; give another --out") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._path.unlink()  # while it is held: who opened it before finds another file at the path, and retries
        os.close(self._opened)
        if self._made:
            with suppress(OSError):
                self._out.rmdir()  # if nothing came of the run

    def _by_kernel(self) -> int:
        while True:
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _has_name(opened, self._path):
                    _describe(opened)
                    return opened
            except BlockingIOError:
                holder = _read(opened)
                os.close(opened)
                raise in_use(self._out, holder, remedy="") from None
            except BaseException:
                os.close(opened)
                raise
            os.close(opened)  # its last holder removed it before it was locked here


def has_locks(out: Path) -> bool:
    """Whether the file system knows flock: tried on the folder itself."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FLOCK
    finally:
        os.close(folder)
    return True


def lock_by_existence(out: Path) -> int:
    """For file systems without locks: make the file, or take over that of a process of this host that has ended."""
    path = out / LOCK
    while True:
        try:
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            _remove_if_holder_dead(out, path)
            continue
        try:
            _describe(opened)
        except BaseException:
            path.unlink()
            os.close(opened)
            raise
        return opened


def _remove_if_holder_dead(out: Path, path: Path) -> None:
    """Remove the file of a holder that has ended. Another process may do the same, and hold it by now."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with os.fdopen(opened, "rb"):
        holder = _read(opened)
        if _lives(holder):
            known = holder.get("host") == socket.gethostname()  # then its end will be seen here
            raise in_use(out, holder, remedy="" if known else f" (if it is gone: remove {path})")
        aside = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            path.rename(aside)
            if not _has_name(opened, aside):
                with suppress(FileExistsError):
                    os.link(aside, path)  # a live holder's was moved: put it back
            aside.unlink()


def in_use(out: Path, holder: dict[str, object], remedy: str) -> ConfigError:
    if "pid" not in holder:
        return ConfigError(f"--out {out} is in use by another process; wait for it, or give another --out{remedy}")
    return ConfigError(
        f"--out {out} is in use by process {holder['pid']} on host {holder.get('host')} since {holder.get('since')}; "
        f"wait for it, or give another --out{remedy}"
    )


def _lives(holder: dict[str, object]) -> bool:
    """Whether the holder still runs; one on another host may."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    return _started(pid) is not None and _started(pid) == holder.get("started")


def _started(pid: int) -> str | None:
    """When a process started, in ticks of this boot: a later one with the same number has another."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return ticks + " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _describe(opened: int) -> None:
    about = {
        "host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "started": _started(os.getpid()), "command": sys.argv,
    }  # fmt: skip
    os.ftruncate(opened, 0)
    os.pwrite(opened, json.dumps(about).encode() + b"\n", 0)


def _read(opened: int) -> dict[str, object]:
    """Who holds it; empty if that is just being written."""
    try:
        about = json.loads(os.pread(opened, MOST_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _has_name(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False
