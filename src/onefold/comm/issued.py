"""The messages that were issued on one link and may not have completed, in the order that all its ranks share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onefold.comm.diagnosis import Overdue
from onefold.comm.meter import Label


class Message(NamedTuple):
    """A message that was issued and may not have completed."""

    number: int
    label: Label
    done: Callable[[], bool]
    timeout_s: float
    issued_s: float


class IssuedMessages:
    """The messages of one link. `ranks` are the global ranks at its ends."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.given = ranks  # the caller's own object, which is compared faster than its ranks
        self.count = 0
        self.last: Label | None = None
        self.unfinished: deque[Message] = deque()
        self.oldest_since_s = 0.0  # the oldest message had none before it from this time on
        self._dropping = threading.Lock()

    def drop_completed(self, since_s: float) -> None:
        """Drops messages that have completed; called by two threads, of which one may go away empty-handed."""
        if self._dropping.acquire(blocking=False):
            try:
                while self.unfinished and _completed(self.unfinished[0]):
                    self.unfinished.popleft()
                    self.oldest_since_s = since_s
            finally:
                self._dropping.release()

    def overdue(self, now_s: float) -> Overdue | None:
        """The oldest unfinished message, and how long it has been the oldest."""
        try:
            oldest = self.unfinished[0]
        except IndexError:
            return None
        waited_s = now_s - max(oldest.issued_s, self.oldest_since_s)
        return Overdue(self.name, self.ranks, oldest.number, oldest.label, oldest.timeout_s, waited_s)


def _completed(message: Message) -> bool:
    try:
        return message.done()
    except Exception:
        return True  # it has failed, which the main thread meets by itself
