"""When to stop early: a signal, or a word from the launcher. The step in hand is finished and saved, or it is late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_S = 1.0  # signals within a second count as one: a launcher passes on what a terminal sent to all already


class Stop:
    """Asked to stop, or not yet. As a context it listens to signals; a second one, more than a second later, ends the
    process at once, or sets `asked_again`.

    `on_signal` is called with the name of the first signal, `on_listening` once the handlers are installed; `on_late`
    with the name of the signal, by a thread, if the context has not been left `limit_s` seconds after it.
    """

    def __init__(
        self, on_signal: Callable[[str], None] = lambda _: None, on_listening: Callable[[], None] = lambda: None, *,
        ends_at_second: bool = True, limit_s: float = threading.TIMEOUT_MAX,
        on_late: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.asked = self.asked_again = False
        self._ends_at_second = ends_at_second
        self.number = int(signal.SIGTERM)  # of the signal that asked
        self._on_signal, self._on_listening = on_signal, on_listening
        self._limit_s, self._on_late, self._timer = limit_s, on_late, threading.Timer(0.0, lambda: None)
        self._first_s: float | None = None
        self._before: dict[int, Any] = {}

    def ask(self) -> None:
        self.asked = True

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._heard)
        self._on_listening()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        while self._before:
            signal.signal(*self._before.popitem())

    def _heard(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is not None and now - self._first_s > SAME_SIGNAL_S:
            if self._ends_at_second:
                os._exit(128 + number)
            self.asked_again, self.number = True, number
        if self._first_s is None:
            self._first_s, self.number = now, number
            self._on_signal(signal.Signals(number).name)
            limit_s = min(self._limit_s, threading.TIMEOUT_MAX)
            self._timer = threading.Timer(limit_s, self._on_late, [signal.Signals(number).name])
            self._timer.daemon = True
            self._timer.start()
        self.asked = True
