"""Whether a file or folder could have been changed by another user of the machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # access control lists show up in the group's bits


class Untrusted(OSError):
    """A folder that another user could have written to; the message says why."""


def why_untrusted(status: os.stat_result) -> str | None:
    """Why a file or folder cannot be trusted; None if only this user and root may write to it.

    Give it the status of an open descriptor (`os.fstat`): what a name leads to may change between two calls.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & OTHERS_WRITE:
        return f"group or others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


@contextmanager
def private_folder(path: Path, mended: Callable[[int], int], flags: int = 0) -> Iterator[int]:
    """A descriptor of the folder, which is made with mode 0700 if it does not exist, as are those above it.

    A folder that this user owns gets the mode that `mended` returns for the mode it has. Raises Untrusted if others may
    write to the folder even so. `flags` are added to those of `os.open`, such as O_NOFOLLOW.
    """
    for folder in (*reversed(path.parents), path):
        if not os.path.exists(folder):
            with suppress(FileExistsError):  # another process makes it too
                os.mkdir(folder, 0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        status = os.fstat(opened)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid() and mended(mode) != mode:
            os.fchmod(opened, mended(mode))
        if why := why_untrusted(os.fstat(opened)):
            raise Untrusted(why)
        yield opened
    finally:
        os.close(opened)
