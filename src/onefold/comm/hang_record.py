"""The record of a hang: what one rank does when a message is found not to complete, in one file.

The folder is named by the environment variable ONEFOLD_RECORDS; without it nothing is written. `onefold doctor FOLDER`
says in three lines what the records of all ranks say together.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from onefold.comm.issued import IssuedMessages

RECORDS = "ONEFOLD_RECORDS"
NAME = "rank-{}.json"
MAIN = "MainThread"
MOST_MESSAGES = 16  # of a link


class LinkRecord(NamedTuple):
    """The messages of one link; those that have not completed with the seconds since they were issued."""

    name: str
    ranks: tuple[int, ...]
    issued: int
    last: str
    unfinished: tuple[tuple[int, str, float], ...]


class Call(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line}): {self.source}"


@dataclass(frozen=True)
class HangRecord:
    rank: int
    world: int
    host: str
    pid: int
    at_s: float  # since the epoch
    finding: str
    links: tuple[LinkRecord, ...]
    stacks: dict[str, tuple[Call, ...]]  # by thread, the innermost call last
    resident_bytes: int
    device_bytes: int

    @classmethod
    def now(cls, rank: int, world: int, finding: str, links: Sequence[IssuedMessages]) -> HangRecord:
        """What this process does at this instant."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): tuple(
                Call(call.filename, call.lineno or 0, call.name, call.line or "")
                for call in traceback.extract_stack(frame)
            )
            for ident, frame in sys._current_frames().items()
        }
        device_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        return cls(
            rank, world, socket.gethostname(), os.getpid(), time.time(), finding, tuple(map(_link, links)), stacks,
            _resident_bytes(), device_bytes,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """All of it or nothing."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / NAME.format(self.rank)
        draft = target.with_suffix(f".{self.pid}")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(target)


def record_hang(rank: int, world: int, finding: str, links: Sequence[IssuedMessages] = ()) -> None:
    """Write a record, if a folder is named, and this process has written none. Failures are not errors: what is found
    is raised in any case."""
    folder = os.environ.get(RECORDS)
    if folder and not _written:
        _written.append(rank)
        with suppress(Exception):
            HangRecord.now(rank, world, finding, links).write(Path(folder))


_written: list[int] = []


def _link(link: IssuedMessages) -> LinkRecord:
    now_s = time.monotonic()
    waiting = list(link.unfinished)[:MOST_MESSAGES]
    unfinished = tuple((one.number, str(one.label), round(now_s - one.issued_s, 3)) for one in waiting)
    return LinkRecord(link.name, link.ranks, link.count, str(link.last or ""), unfinished)


def _resident_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
