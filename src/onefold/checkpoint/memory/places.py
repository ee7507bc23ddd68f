"""Where copies are kept: a folder in the memory of a node, of this user alone, that outlives a rank and not the run.

By default the folder is in /dev/shm, and its name has the process that owns it: the agent that starts ranks again
(Onefold's launcher or torchrun's), or else the rank itself. Folders whose owner has ended are removed by the next run.
ONEFOLD_MEMORY names another folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from onefold.comm.rendezvous import STORE
from onefold.errors import ConfigError
from onefold.offload.host_memory import available_bytes
from onefold.settings.trust import private_folder

MEMORY = "ONEFOLD_MEMORY"
SHARED_MEMORY = Path("/dev/shm")
OWNED = re.compile(r"onefold-([0-9]+)-([0-9]+)-([0-9]+)-([0-9]+)")  # user, namespace of processes, process, its start
DRAFT = ".writing-"  # begins the name of a copy that is not complete


def copies_folder(run: str | Path) -> Path:
    """The folder on this node for copies of the run whose checkpoints are in `run`; made if it does not exist."""
    given = os.environ.get(MEMORY)
    base = Path(given).absolute() if given else owned_folder(agent())
    if not given and not SHARED_MEMORY.is_dir():
        raise ConfigError(f"this system has no {SHARED_MEMORY} for copies of the state; name a folder in {MEMORY}")
    folder = base / hashlib.sha256(str(run).encode()).hexdigest()[:16]
    try:
        for path in (folder,) if given else (base, folder):
            with private_folder(path, lambda _: 0o700, os.O_NOFOLLOW):
                pass
    except OSError as error:
        raise ConfigError(
            f"copies of the state cannot be kept in {folder}: {error.strerror or error}; name a folder of your own in "
            f"memory: {MEMORY}=…"
        ) from error
    return folder


def agent() -> int:
    """The process that starts this rank again when ranks were lost: its parent, or itself if nobody does."""
    return os.getppid() if STORE in os.environ or "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def owned_folder(process: int) -> Path:
    """The folder in shared memory of one process and the ranks that it starts."""
    return SHARED_MEMORY / f"onefold-{os.geteuid()}-{_namespace()}-{process}-{_started(process)}"


def remove_stale() -> None:
    """Removes folders of this user whose owner has ended, as far as this process can know."""
    for path in SHARED_MEMORY.glob("onefold-*") if SHARED_MEMORY.is_dir() else ():
        match = OWNED.fullmatch(path.name)
        if match is None or (int(match[1]), int(match[2])) != (os.geteuid(), _namespace()):
            continue
        if _started(int(match[3])) != int(match[4]):
            remove(path)


def remove(folder: Path) -> None:
    """Removes a folder of copies; links are not followed."""
    with suppress(OSError):
        if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
            return
        shutil.rmtree(folder, ignore_errors=True)


def remove_copies(folder: Path) -> None:
    """Removes the copies of a run, and the folder of its agent if that is empty now."""
    remove(folder)
    if MEMORY not in os.environ:
        with suppress(OSError):  # another run has copies there
            folder.parent.rmdir()


def identity(folder: Path) -> str:
    """Names the memory in which a folder is: ranks that see the same folder give the same name."""
    found = folder.stat()
    return f"{_text(Path('/proc/sys/kernel/random/boot_id'))}/{found.st_dev}/{found.st_ino}"


def room_bytes(folder: Path) -> int:
    """Bytes of host memory that copies in this folder may take, those that are there included."""
    found = os.statvfs(folder)
    there = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    return min(found.f_bavail * found.f_frsize, available_bytes()) + there


def _namespace() -> int:
    """The number of this process's namespace of processes; 0 if the system has none."""
    try:
        return int(os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0


def _started(process: int) -> int:
    """When a process was started, in ticks since the system's start; 0 if there is none."""
    words = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return int(words[19]) if len(words) > 19 and words[0] not in "ZX" else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
