"""Whether a file or folder could have been changed by another user of the machine."""

from __future__ import annotations

import os
import stat

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # access control lists show up in the group's bits


def ours_alone(status: os.stat_result) -> str | None:
    """Why a file or folder cannot be trusted; None if only this user and root may write to it.

    Give it the status of an open descriptor (`os.fstat`): what a name leads to may change between two calls.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & OTHERS_WRITE:
        return f"group or others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
