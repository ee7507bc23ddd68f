"""What an object store's error means: whether the same request may succeed later, and what a user is told."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from onefold.checkpoint.format.storage import VERBS
from onefold.errors import CheckpointError

SERVICES = ("aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "azure", "requests", "urllib3")
FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
FINAL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EINVAL, errno.EPERM, errno.ENOSYS)
DAMAGED_ON_THE_WAY = ("BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch")
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError")


class ObjectMissing(CheckpointError):
    """The object is not there."""


class ObjectExists(CheckpointError):
    """The object is there already."""


def code_of(error: BaseException) -> str:
    """The code of an answer of S3, also of one that s3fs has made an OSError of; empty if there is none."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: the network, a time-out, a store that is overloaded."""
    if isinstance(error, FINAL) or type(error).__name__ in NO_CREDENTIALS:
        return False
    if code_of(error) in DAMAGED_ON_THE_WAY:
        return True
    if isinstance(error, OSError | asyncio.TimeoutError | EOFError):
        return getattr(error, "errno", None) not in FINAL_NUMBERS
    return type(error).__module__.partition(".")[0] in SERVICES


def explained(operation: str, path: Path, error: Exception) -> CheckpointError:
    """A CheckpointError that says what was tried, the store's reason, and the remedy."""
    if isinstance(error, CheckpointError):
        return error
    kind, remedy = CheckpointError, ""
    if isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS:
        remedy = "; give credentials that may read, write and list there, as the store's package takes them"
        if path.parts[0].startswith("s3"):
            remedy += " (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
    elif isinstance(error, FileNotFoundError):
        kind = ObjectMissing
        remedy = "; the bucket must exist, and nobody may change a checkpoint meanwhile"
    elif isinstance(error, FileExistsError):
        kind = ObjectExists
    return kind(f"could not {VERBS[operation]} {path}: {said(error)}{remedy}")


def said(error: Exception) -> str:
    """What an error says, on one line; its kind where it says nothing."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return text or type(error).__name__
