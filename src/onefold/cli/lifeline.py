"""The line between a launcher and its ranks: it says when to stop, they say what went wrong, and neither outlives it.

A Unix socket. If the launcher dies, however that happens, the line breaks and each rank ends itself: nothing is left
running. A rank that starts after that finds nobody to connect to.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

LINE = "ONEFOLD_LIFELINE"  # where the launcher listens
LAUNCHER = "ONEFOLD_LAUNCHER"  # its process
STOP = b"stop\n"
PR_SET_PDEATHSIG = 1


class Lifeline:
    """A rank's end; without a launcher, nobody's."""

    def __init__(self, on_stop: Any) -> None:
        self._on_stop = on_stop
        self._line: socket.socket | None = None
        if LINE in os.environ:
            self._line = connect(os.environ[LINE])
            die_with_parent()  # the agent, which dies with the launcher: a rank that was stopped cannot listen
            if self._line is None:
                os._exit(1)  # whoever started us is gone
            self.say({"rank": _number("RANK"), "restart": _number("TORCHELASTIC_RESTART_COUNT")})
            threading.Thread(target=self._listen, name="onefold-lifeline", daemon=True).start()

    @property
    def there(self) -> bool:
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


def connect(path: str) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(path)
    except OSError:
        line.close()
        return None
    return line


def orphaned() -> bool:
    """Whether whoever started this rank has ended."""
    line = connect(os.environ[LINE]) if LINE in os.environ else None
    if line is not None:
        line.close()
    return line is None and LINE in os.environ


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def follow_launcher() -> None:
    """End this process with the one that started it."""
    die_with_parent()
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it had ended before we could ask


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))
