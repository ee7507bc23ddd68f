"""The storage of a path: the file system, or the object store that an address names."""

from __future__ import annotations

import os
from pathlib import Path

from onefold.checkpoint.format.address import Address
from onefold.checkpoint.format.remote import DEADLINE, PACKAGES, RemoteStorage
from onefold.checkpoint.format.s3 import S3Storage
from onefold.checkpoint.format.storage import Storage
from onefold.errors import ConfigError

DEADLINE_S = 240.0


def storage_of(path: Path) -> Storage:
    """The storage of a path, or of the store that an Address names. Raises without the package for that store."""
    if not isinstance(path, Address):
        return Storage()
    if not path.key.strip("/"):
        raise ConfigError(f"{path} names no place in the store; wanted is an address as s3://bucket/run")
    kind = S3Storage if PACKAGES.get(path.scheme) == "s3fs" else RemoteStorage
    return kind(path, _deadline_s())


def check_shared(path: Path, ranks: int) -> None:
    """Raises for `memory://` with several ranks: each would write to a store of its own process."""
    if isinstance(path, Address) and path.scheme == "memory" and ranks > 1:
        raise ConfigError(
            f"{path} is in the memory of one process, and there are {ranks} ranks; give the address of a store, or a "
            f"folder, that all of them see"
        )


def _deadline_s() -> float:
    text = os.environ.get(DEADLINE, str(DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{DEADLINE}={text!r} is not a number of seconds above 0")
    return seconds
