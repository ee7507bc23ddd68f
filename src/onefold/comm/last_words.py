"""The last words of a rank: the exception that ends it is told to the other ranks, whose own errors begin with it.

On gloo there is no watcher (watching.py): a message whose peer is gone raises by itself, but cannot say what ended the
peer, and may name another that ended because of it. So a rank that ends by an exception puts that into the store,
before its connections close; the first to do so is heard by all. A thread asks the store, which may never answer.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from onefold.comm.diagnosis import obituary
from onefold.comm.watching import current_watcher
from onefold.errors import CommError

WORDS = "onefold-last-words"
PATIENCE_S = 1.5

_own_process = 0  # in which the hook was installed: a child that is forked must not speak for its rank


def leave_last_words() -> None:
    """From now on an exception that nothing catches is told to the other ranks."""
    global _own_process
    if _own_process == os.getpid():
        return
    _own_process, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() == _own_process and isinstance(error, Exception):
            tell_last_words(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def tell_last_words(error: BaseException) -> None:
    """Tells the other ranks that this one ends by an error, unless it only found that another has ended."""
    if not isinstance(error, CommError) and _others():
        text = obituary(dist.get_rank(), error)
        _asked(lambda store: store.compare_set(WORDS, "", text).decode())


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
