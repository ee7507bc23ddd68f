"""The lifeline, a socket between the launcher and one rank: the launcher sends "stop", the rank its phase, errors and
result.

A pair of sockets that the rank inherits: it has no name, so nobody else can join. When the launcher ends, however that
happens, the line breaks and the rank ends itself; one that cannot read (stopped by SIGSTOP) is ended by the kernel.

What a rank says is one JSON object a line:
    {"phase": "training"}                  it has come to the first step; "preparing" another run; "finished"
    {"error": text, "level": Level}        what went wrong, just before it ends
    {"signal": "SIGTERM"}                  somebody signalled this rank itself
    {"result": anything}                   what a command found, of rank 0
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onefold.comm.last_words import LINE

STOP = b"stop\n"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
PREPARING, TRAINING, FINISHED = "preparing", "training", "finished"


class Lifeline:
    """A rank's end of the line; without a launcher, messages are dropped."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._line: socket.socket | None = None
        if LINE in os.environ:
            self._line = socket.socket(fileno=int(os.environ[LINE]))
            self._line.set_inheritable(False)  # or a child would keep the line open when this process has ended
            threading.Thread(target=self._listen, name="onefold-lifeline", daemon=True).start()

    @property
    def launched(self) -> bool:
        """True if Onefold's launcher started this rank."""
        return self._line is not None

    def say(self, what: dict[str, Any]) -> None:
        if self._line is not None:
            with suppress(OSError):
                self._line.sendall(json.dumps(what).encode() + b"\n")

    def _listen(self) -> None:
        assert self._line is not None
        with suppress(OSError):
            while said := os.read(self._line.fileno(), 64):
                if STOP in said:
                    self._on_stop()
        os.kill(os.getpid(), signal.SIGKILL)  # not exit: threads of libraries may hold locks, and peers must see it now


def die_with(parent: int) -> None:
    """Called in a child between fork and exec: makes the kernel kill it when its parent ends."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)


def name_process(name: str) -> None:
    """Sets the name that ps and top show, of at most 15 bytes."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def flush_c() -> None:
    """Writes what libraries in C have printed and not yet written."""
    _LIBC.fflush(None)


_LIBC = ctypes.CDLL(None)  # loaded here: after a fork, loading is not safe
