"""Reads a copy whose files are in the memory of several nodes: those of this node directly, others through ranks there.

While ranks load, a thread on each answers its peers in rounds: 1 all ranks say which ranges of which files they want
2 the ranks that have them send them. Rounds end once every rank has loaded. What a round moves is bounded.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from onefold.checkpoint.format.folder import MANIFEST
from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.errors import CheckpointError, CommError
from onefold.offload.host_memory import bytes_of

T = TypeVar("T")
COPY = Path("copy in memory")  # what stands for the folder, which has no one place
RANGES = Label("checkpoint", "copies in memory")
AT_ONCE = 8  # ranges that a rank asks for in a round; each has at most 4 MiB
PAUSE_S = 0.005  # that a rank with nothing to ask for waits before a round


class Range:
    """Some bytes of a file that a peer has."""

    def __init__(self, file: str, offset: int, into: memoryview) -> None:
        self.file, self.offset, self.into = file, offset, into
        self.done = threading.Event()


class Peers:
    """The ranks of a load, which read each other's files. As a context it answers them until all have left theirs."""

    def __init__(self, comm: Comm, holders: Mapping[str, int], read: Callable[[str, int, memoryview], None]) -> None:
        self._comm, self._holders, self._read = comm, holders, read
        self._asked: queue.SimpleQueue[Range] = queue.SimpleQueue()
        self._left, self._error = False, ""
        self._thread = threading.Thread(target=self._run, name="onefold-peers", daemon=True)

    def __enter__(self) -> Peers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._thread.join()

    def read(self, file: str, offset: int, into: memoryview) -> None:
        """Fills `into` from a file that a peer has; on any thread."""
        wanted = Range(file, offset, into)
        self._asked.put(wanted)
        while not wanted.done.wait(1.0):
            if not self._thread.is_alive():
                break
        if self._error:
            raise CommError(self._error)

    def _run(self) -> None:
        waiting: list[Range] = []
        try:
            while True:
                waiting = self._next()
                rows = [[wanted.file, wanted.offset, len(wanted.into)] for wanted in waiting]
                said = json.dumps([self._left and not rows, rows]).encode()
                answers = [json.loads(row) for row in self._comm.exchange(said, RANGES)]
                self._swap(waiting, [row[1] for row in answers])
                if all(row[0] for row in answers):
                    return
        except Exception as error:  # a peer has ended: those who wait must hear of it
            self._error = str(error)
            for wanted in [*waiting, *self._drained()]:
                wanted.done.set()

    def _next(self) -> list[Range]:
        found = []
        with suppress(queue.Empty):
            found.append(self._asked.get(timeout=PAUSE_S))
            while len(found) < AT_ONCE:
                found.append(self._asked.get_nowait())
        return found

    def _drained(self) -> Iterable[Range]:
        with suppress(queue.Empty):
            while True:
                yield self._asked.get_nowait()

    def _swap(self, waiting: list[Range], asked: list[list[tuple[str, int, int]]]) -> None:
        """Sends what peers have asked this rank for, and receives what this rank has asked them for."""
        sends, receives, rank = {}, {}, self._comm.rank
        for peer, rows in enumerate(asked):
            mine = [row for row in rows if self._holders[row[0]] == rank]
            if mine:
                sends[peer] = self._packed(mine)
        by_holder: dict[int, list[Range]] = {}
        for wanted in waiting:
            by_holder.setdefault(self._holders[wanted.file], []).append(wanted)
        for holder, ranges in by_holder.items():
            receives[holder] = torch.empty(sum(len(one.into) for one in ranges), dtype=torch.uint8)
        self._comm.swap(sends, receives, RANGES).wait()
        for holder, ranges in by_holder.items():
            data, at = bytes_of(receives[holder]), 0
            for one in ranges:
                one.into[:] = data[at : at + len(one.into)]
                at += len(one.into)
                one.done.set()

    def _packed(self, rows: list[tuple[str, int, int]]) -> torch.Tensor:
        out = torch.zeros(sum(row[2] for row in rows), dtype=torch.uint8)
        data, at = bytes_of(out), 0
        for file, offset, size in rows:
            with suppress(CheckpointError):  # the peer finds zeros, and by their digest that they are not the bytes
                self._read(file, offset, data[at : at + size])
            at += size
        return out


class CopyStorage(Storage):
    """The files of one copy as one folder: those of this node, and those that peers have."""

    def __init__(self, text: bytes, manifest: Manifest, here: Mapping[str, Path], peers: Peers | None = None) -> None:
        self._text, self._here, self._peers = text, here, peers
        self._sizes = {file.name: file.bytes for file in manifest.files}

    def names(self, path: Path) -> list[str]:
        return sorted([MANIFEST, *(self._sizes if self._peers else self._here)])

    def size(self, path: Path) -> int:
        if path.name == MANIFEST:
            return len(self._text)
        return super().size(self._here[path.name]) if path.name in self._here else self._sizes[path.name]

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        if path.name == MANIFEST:
            into[:] = self._text[offset : offset + len(into)]
        elif path.name in self._here:
            super().read(self._here[path.name], offset, into)
        else:
            assert self._peers is not None
            self._peers.read(path.name, offset, into)

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        if self._peers is None:
            return super().each(act, items)
        with ThreadPoolExecutor(AT_ONCE) as readers:
            for _ in readers.map(act, items):
                pass
