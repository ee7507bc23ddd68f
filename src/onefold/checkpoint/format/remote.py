"""Checkpoints in any object store that fsspec knows: requests that are repeated until a deadline, reads of ranges.

A store has no folders, no renames and nothing to flush: an object is there whole or not at all. What fsspec has no
words for, uploads in parts and conditional puts, is in s3.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from onefold.checkpoint.format.address import Address
from onefold.checkpoint.format.remote_errors import ObjectExists, ObjectMissing, explained, may_pass, said
from onefold.checkpoint.format.storage import VERBS, Out, Storage, ends_early
from onefold.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")
S = TypeVar("S")

DEADLINE = "ONEFOLD_REMOTE_DEADLINE_S"  # the variable that sets after how long a request is no longer repeated
TRIES_IN_DEADLINE = 4  # of requests that are never answered
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
READS = 8  # ranges of one file that are read at once
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


class Kept:
    """The file system of fsspec that was made last: to make one takes 0.1 s, mostly to read service descriptions."""

    def __init__(self) -> None:
        self._last: tuple[str, Any] = "", None
        self._lock = threading.Lock()

    def get(self, made_of: str, make: Callable[[], Any]) -> Any:
        """The last file system if `made_of` is the same text as for that one, else a new one."""
        with self._lock:
            if self._last[0] != made_of:
                self._last = made_of, make()
            return self._last[1]


KEPT = Kept()  # one per process: each save, load or listing opens the store anew


def _file_system(
    address: Address, options: Callable[[dict[str, Any]], dict[str, Any]], made_of: str | None = None
) -> Any:
    """The file system of fsspec for an address, without a cache of listings. `made_of` is all that it depends on beside
    its arguments; where that is known, storages of this process with the same share one file system."""
    package = PACKAGES.get(address.scheme, "")
    try:
        import fsspec
        from fsspec.config import conf

        kind = fsspec.get_filesystem_class(address.scheme)
    except ImportError as error:
        raise CheckpointError(
            f"{address} needs a package that is not installed ({error}); "
            f"{' '.join(['pip install', chr(39) + 'onefold[remote]' + chr(39), package]).rstrip()}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{address} has a scheme that fsspec does not know: {error}") from error
    try:
        more = options(conf.get(address.scheme, {}))
        make = partial(kind, skip_instance_cache=True, use_listings_cache=False, **more)
        return make() if made_of is None else KEPT.get(f"{os.getpid()} {kind} {conf} {more} {made_of}", make)
    except Exception as error:  # whatever a store's package makes of its configuration
        raise CheckpointError(f"{address} cannot be opened: {type(error).__name__}: {error}") from error


class RemoteStorage(Storage):
    """An object store. Every request is repeated after errors that may pass, until `deadline_s` have gone by; once a
    store has let a deadline pass, each later request to it is tried once."""

    renames = False

    def __init__(self, address: Address, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._gave_up = threading.Event()
        self._fs = _file_system(address, self._options, self._made_of())

    def _options(self, configured: dict[str, Any]) -> dict[str, Any]:
        """Arguments for fsspec's file system beside those that the user configured."""
        return {}

    def _made_of(self) -> str | None:
        """What fsspec's file system depends on beside its arguments, such as credentials; None if that is not known."""
        return None

    # -- the operations of Storage --------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        """Folders are there once something is in them."""

    def sync_folder(self, path: Path) -> None:
        """What a store has acknowledged is there."""

    def create(self, path: Path, size: int | None = None) -> Out:
        return StreamOut(self, path, self.request("create", path, lambda: self._fs.open(self.key(path), "wb")))

    def remove_folder(self, path: Path) -> None:
        """A folder is gone with the last object in it."""

    def remove(self, path: Path) -> None:
        with suppress(ObjectMissing):  # by a request whose answer was lost
            self.request("remove", path, lambda: self.call("rm_file", self.key(path)))

    def names(self, path: Path) -> list[str]:
        return sorted(self._listed(path))

    def exists(self, path: Path) -> bool:
        return self._info(path) is not None

    def is_folder(self, path: Path) -> bool:
        info = self._info(path)
        return info is not None and info["type"] == "directory"

    def is_link(self, path: Path) -> bool:
        return False

    def size(self, path: Path) -> int:
        info = self._info(path)
        if info is None:
            raise ObjectMissing(f"could not look at {path}: no such object; nobody may change a checkpoint meanwhile")
        if info["type"] != "file":
            raise CheckpointDamaged(f"{path} is no single object; wanted is a plain file")
        return int(info["size"])

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        stop = offset + len(into)
        if not len(into):
            return
        data = self.request("read", path, lambda: self.call("cat_file", self.key(path), start=offset, end=stop))
        if len(data) < len(into):
            raise ends_early(path, offset + len(data), stop)
        into[:] = data[: len(into)]

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        with ThreadPoolExecutor(READS) as readers:
            for done in [readers.submit(act, item) for item in items]:
                done.result()

    def is_committed(self, manifest: Path) -> bool:
        return self.exists(manifest)

    # -- further operations of stores -----------------------------------------------------------------------------

    def check_access(self, path: Path) -> None:
        """Raises unless the store answers and lets this user list what is there."""
        self._listed(path)

    def sizes(self, path: Path) -> dict[str, int]:
        """The sizes of the objects directly under a path, by name."""
        return {name: int(info["size"] or 0) for name, info in self._listed(path).items() if info["type"] == "file"}

    def publish(self, path: Path, data: bytes, replaces: str | None) -> None:
        """Puts an object in one request: whoever looks finds all of it or what was there before. Raises if that is not
        the `version` that it replaces (None: nothing), where the store can tell."""
        mode = "create" if replaces is None else "overwrite"
        self._put_once(path, data, lambda: self.call("pipe_file", self.key(path), data, mode=mode))

    def version(self, path: Path) -> str:
        """What tells this content of an object from another, where the store has that; else an empty text."""
        return ""

    def remove_below(self, path: Path) -> None:
        """Removes all objects under a path."""

        def act() -> None:
            found = self.call("find", self.key(path))
            if found:
                self._fs.rm(found)

        with suppress(ObjectMissing):
            self.request("remove_folder", path, act)

    def copy(self, old: Path, new: Path) -> None:
        """Copies an object within the store."""
        self.request("create", new, lambda: self.call("cp_file", self.key(old), self.key(new)))

    def abandon_uploads(self, path: Path) -> None:
        """Removes parts of objects under a path whose upload was never completed, where the store keeps such."""

    # -- requests -------------------------------------------------------------------------------------------------

    def key(self, path: Path) -> str:
        return str(self._fs._strip_protocol(str(path)))

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One call of fsspec's file system; raises TimeoutError if it takes too long."""
        if not self._fs.async_impl:
            return getattr(self._fs, name)(*args, **kwargs)
        from fsspec.asyn import sync

        limit_s = self._deadline_s / TRIES_IN_DEADLINE
        return sync(self._fs.loop, getattr(self._fs, f"_{name}"), *args, timeout=limit_s, **kwargs)

    def request(self, operation: str, path: Path, act: Callable[[], S]) -> S:
        """Runs `act` until it succeeds, fails for good, or the deadline has passed."""
        began, pause_s, tries = time.monotonic(), FIRST_PAUSE_S, 0
        while True:
            tries += 1
            try:
                self.at(operation, path)
                return act()
            except CheckpointError:
                raise
            except Exception as error:
                if not may_pass(error):
                    raise explained(operation, path, error) from error
                passed_s = time.monotonic() - began
                if self._gave_up.is_set() or passed_s + pause_s > self._deadline_s:
                    self._gave_up.set()
                    raise CheckpointError(
                        f"could not {VERBS[operation]} {path}: {said(error)}; tried {tries} times in {passed_s:.0f} s, "
                        f"give the store more time by {DEADLINE}"
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _info(self, path: Path) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self.request("exists", path, lambda: self.call("info", self.key(path)))
            return found
        except ObjectMissing:
            return None

    def _listed(self, path: Path) -> dict[str, dict[str, Any]]:
        """What is directly under a path, by name; nothing if the path is not there."""
        top = self.key(path).rstrip("/") + "/"
        try:
            rows = self.request("names", path, lambda: self.call("ls", self.key(path), detail=True))
        except ObjectMissing:
            return {}
        found = {row["name"].rstrip("/").removeprefix(top): row for row in rows if row["name"].startswith(top)}
        return {name: row for name, row in found.items() if name not in ("", ".", "..") and "/" not in name}

    def _put_once(self, path: Path, data: bytes, put: Callable[[], object]) -> None:
        try:
            self.request("create", path, put)
        except ObjectExists as error:
            # Perhaps by this very request, of which the answer was lost and which was then repeated.
            found = bytearray(min(self.size(path), len(data) + 1))
            self.read(path, 0, memoryview(found))
            if bytes(found) != data:
                raise CheckpointError(
                    f"{path} was written by another job meanwhile, so this one is not committed; two jobs must not "
                    f"save to one folder"
                ) from error


class StreamOut(Out):
    """A new object, written from start to end by fsspec, which is there once `finish` returns."""

    def __init__(self, storage: RemoteStorage, path: Path, stream: Any) -> None:
        self._store, self._path, self._stream = storage, path, stream

    def write(self, data: memoryview) -> None:
        self._explaining("write", lambda: self._stream.write(data))

    def finish(self) -> None:
        stream, self._stream = self._stream, None
        self._explaining("finish", stream.close)

    def close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with suppress(Exception):  # of an object that nobody will ask for
                stream.discard()

    def _explaining(self, operation: str, act: Callable[[], object]) -> None:
        try:
            self._store.at(operation, self._path)
            act()
        except Exception as error:
            raise explained(operation, self._path, error) from error
