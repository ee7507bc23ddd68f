"""The last words of a rank: the exception that ends it is told to the other ranks, whose own errors begin with it.

On gloo there is no watcher (watching.py): a message whose peer is gone raises by itself, but cannot say what ended the
peer, and may name another that ended because of it. So a rank that ends by an exception puts that into the store,
before its connections close; the first to do so is heard by all. A thread asks the store, which may never answer.
A rank of `onefold run` also tells the launcher, which ends the run with that error: the rank was not lost.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch.distributed as dist

from onefold.comm.diagnosis import obituary
from onefold.comm.watching import current_watcher
from onefold.errors import CommError, MismatchError, OnefoldError

WORDS = "onefold-last-words"
GLOO = "gloo/transport"  # in what gloo's errors say, which have no class of their own
PATIENCE_S = 1.5
LINE = "ONEFOLD_LIFELINE"  # where Onefold's launcher has started this rank: its line to it, as a file descriptor


class Level(IntEnum):
    """How much an error says about the first cause."""

    PEER = 0  # a peer was gone, or did not answer
    AGREED = 1  # all ranks raise it together: they do not agree
    OWN = 2  # this rank's own

    @classmethod
    def of(cls, error: BaseException) -> Level:
        found_by = {CommError: cls.PEER, dist.DistError: cls.PEER, MismatchError: cls.AGREED}
        if type(error) is RuntimeError and GLOO in str(error):  # of a script's own call of torch.distributed
            return cls.PEER
        return next((level for kind, level in found_by.items() if isinstance(error, kind)), cls.OWN)


_own_process = 0  # in which the hook was installed: a child that is forked must not speak for its rank


def leave_last_words() -> None:
    """From now on an exception that nothing catches is told to the other ranks."""
    global _own_process
    if _own_process == os.getpid():
        return
    _own_process, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        told = os.getpid() == _own_process and isinstance(error, Exception)
        if told:
            tell_last_words(error)
        before(kind, error, traceback)
        if told:
            _tell_launcher(error)  # last: it ends this process soon

    sys.excepthook = hook


def tell_last_words(error: BaseException) -> None:
    """Tells the other ranks that this one ends by an error, unless it only found that another has ended."""
    if not isinstance(error, CommError) and _others():
        text = obituary(dist.get_rank(), error)
        _asked(lambda store: store.compare_set(WORDS, "", text).decode())


def error_report(rank: int, error: BaseException) -> dict[str, Any]:
    """What a rank says to the launcher of the error that ends it."""
    text = str(error) if isinstance(error, OnefoldError) else f"{type(error).__name__}: {error}"
    first, *more = text.strip().splitlines() or [type(error).__name__]
    text = f"{first} … {more[-1]}" if more else first  # of a worker of a DataLoader: its traceback is in between
    message = text if text.startswith("rank ") else f"rank {rank}: {text}"
    return {"error": message, "level": Level.of(error), "kind": type(error).__name__}


def _tell_launcher(error: BaseException) -> None:
    """Writes the error to the launcher of `onefold run`, if one has started this script."""
    if LINE in os.environ and "RANK" in os.environ:
        said = json.dumps(error_report(int(os.environ["RANK"]), error)).encode() + b"\n"
        with suppress(OSError, ValueError):
            line = int(os.environ[LINE])
            if stat.S_ISSOCK(os.fstat(line).st_mode):  # else the script has closed it
                sys.stderr.flush()
                os.write(line, said)


def first_words() -> str:
    """What the first rank that ended by an exception has said; empty if none has."""
    return _asked(lambda store: store.get(WORDS).decode() if store.check([WORDS]) else "") if _others() else ""


def _others() -> bool:
    """Whether there are other ranks, and no watcher, which tells them itself."""
    return dist.is_initialized() and dist.get_world_size() > 1 and current_watcher() is None


def _asked(act: Callable[[dist.Store], str]) -> str:
    found: list[str] = []

    def ask() -> None:
        with suppress(Exception):  # the rank that serves the store may have ended
            store = dist.distributed_c10d._get_default_store()
            found.append(act(store.clone()))  # type: ignore[attr-defined]  # torch's stubs lack it

    asking = threading.Thread(target=ask, name="onefold-last-words", daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return found[0] if found else ""
