"""The notice board of all ranks in the store: questions, answers, and one finding that all ranks read.

A thread of its own makes every call to the store, on a connection of its own: a call may block where the process that
serves the store is stopped, and the watcher must go on counting time then. Once per interval it reads the finding and
the number of the last question; it writes only after a question, so a healthy run adds nothing to the store, of which
a FileStore would keep every write for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from onefold.comm.diagnosis import Beat

FINDING, QUESTIONS, BEAT = "finding", "questions", "beat/{}"
NOTHING_SAID = Beat().encode().encode()
ALERT_TICK_S = 0.1  # between looks while somebody asks
ALERT_S = 15.0  # after a question


class Board:
    """This rank's view of the notice board. The watcher reads the fields, and only the board's thread writes them."""

    def __init__(
        self, store: dist.Store, rank: int, describe: Callable[[int, str], Beat], on_news: Callable[[], None]
    ) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._rank, self._describe, self._on_news = rank, describe, on_news
        self.finding = ""  # the first that a rank has published
        self.question = 0  # the newest question that this rank has heard
        self.alert_until_s = 0.0
        self.beats: dict[int, Beat] = {}  # of the ranks that the watcher asked to read
        self.read_s = 0.0  # when they were read
        self.answered_s = time.monotonic()  # when the store answered last
        self.lost = ""  # why the store does not answer any more
        self.asked: list[int] = []  # the numbers of this rank's own questions
        self.interval_s = 1.0
        self._to_ask = 0
        self._to_read: Sequence[int] = ()
        self._to_publish = ""
        self._left = ""  # how this rank left
        self._answered = -1  # the question to which this rank's beat is the answer
        self._said = Beat()
        self._wake, self._ended, self._turn = threading.Event(), threading.Event(), threading.Condition()
        self._requested = self._served = 0
        self._thread = threading.Thread(target=self._run, name="onefold-board", daemon=True)
        self._thread.start()

    # -- for the watcher and the main thread: none of these waits for the store ----------------------------------------

    @property
    def alert(self) -> bool:
        """Whether a rank has asked lately, so that all ranks look often."""
        return time.monotonic() < self.alert_until_s

    def ask(self) -> int:
        """Asks all ranks what they do; returns where in `asked` the number of the question will be."""
        self._to_ask += 1
        self.wake()
        return self._to_ask - 1

    def read(self, ranks: Sequence[int]) -> None:
        """Has `beats` of these ranks read at every look from now on."""
        self._to_read = ranks

    def publish(self, finding: str) -> None:
        """Publishes a finding; `finding` is then this one, or the one that was there before."""
        self._to_publish = self._to_publish or finding
        self.wake()

    def leave(self, how: str) -> None:
        """Tells peers that this rank issues no more messages."""
        self._left = how
        self.wake()

    def wake(self) -> None:
        self._requested += 1
        self._wake.set()

    def flush(self, patience_s: float) -> bool:
        """Waits until what was handed in is in the store; False if the store does not answer."""
        self.wake()
        wanted = self._requested
        with self._turn:
            return self._turn.wait_for(lambda: self._served >= wanted or bool(self.lost), patience_s) and not self.lost

    def end(self) -> None:
        self._ended.set()
        self.wake()
        self._thread.join(ALERT_TICK_S * 10)  # not for ever: the store may block it

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store.add(QUESTIONS, 0)
            self._say("")
            while not self._ended.is_set():
                self._wake.clear()
                serving = self._requested
                self._look()
                with self._turn:
                    self._served = serving
                    self._turn.notify_all()
                self._wake.wait(min(self.interval_s, ALERT_TICK_S) if self.alert else self.interval_s)
        except Exception as error:  # of torch: the connection is broken, and stays so
            self.lost = (str(error) or type(error).__name__).splitlines()[0]
            with self._turn:
                self._turn.notify_all()
            self._on_news()

    def _look(self) -> None:
        """One round: what this rank has to say, then what others have said."""
        store, left = self._store, self._left
        if left and left != self._said.left:
            self._say(left)
            self.question = self._answered = store.add(QUESTIONS, 1)  # peers with messages in flight look at once
        if self._to_publish and not self.finding:
            self.finding = store.compare_set(FINDING, "", self._to_publish).decode()
            self._on_news()
        while len(self.asked) < self._to_ask:
            self.asked.append(store.add(QUESTIONS, 1))
        newest = int(store.get(QUESTIONS))
        if newest > self.question:
            self.question, self.alert_until_s = newest, time.monotonic() + ALERT_S
            self._on_news()
        if self.question > self._answered or (self.alert and self._describe(0, "").links != self._said.links):
            self._say(left)
        if ranks := self._to_read:
            self.beats = self._beats(ranks)
            self.read_s = time.monotonic()
        if not self.finding and store.check([FINDING]):
            self.finding = store.get(FINDING).decode()
            self._on_news()
        self.answered_s = time.monotonic()

    def _beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        keys = [BEAT.format(rank) for rank in ranks]
        if self._store.check(keys):
            rows = self._store.multi_get(keys)  # one request to a TCPStore, however many ranks
        else:
            rows = [self._store.get(key) if self._store.check([key]) else NOTHING_SAID for key in keys]
        return {rank: Beat.decode(row) for rank, row in zip(ranks, rows, strict=True)}

    def _say(self, left: str) -> None:
        self._said = self._describe(self.question, left)
        self._store.set(BEAT.format(self._rank), self._said.encode())
        self._answered = self.question
