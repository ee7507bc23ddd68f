"""The watcher: notices a peer that is dead, stopped or late, and says which, where no call of the host would wait.

NCCL's messages are ordered on CUDA streams and block no host, so the host does not notice a peer that is gone. One
thread looks at the oldest unfinished message of each link:

| its age | what the watcher does |
|---|---|
| over timeout_s less the time that an answer takes | asks all ranks what they do (board.py) |
| over timeout_s | names the rank behind it (diagnosis.py) and publishes that; the first finding is every rank's |

NCCL may refuse a message at once because a connection broke, without saying whose: then all ranks are asked, too. A
rank that ends by an exception publishes that itself. Once there is a finding, the groups are aborted, and `check`
raises it. A main thread that does not come to `check` while messages are in flight is stuck: the process is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from onefold.comm.board import ALERT_TICK_S, Board
from onefold.comm.diagnosis import (
    EXIT,
    Beat,
    Overdue,
    Position,
    connection_lost,
    diagnose,
    gone,
    obituary,
    store_silent,
)
from onefold.comm.hang_record import record_hang
from onefold.comm.issued import IssuedMessages, Message
from onefold.comm.meter import Label
from onefold.errors import CommError, visible

LONGEST_INTERVAL_S = 1.0
SHORTEST_ANSWER_S, LONGEST_ANSWER_S = 1.5, 10.0  # how long ranks have to answer, before timeout_s is over
SECOND_ANSWER_S = 0.7  # the same for ranks that answered before, once it is over
EXPLAINED_S = 1.8  # for a finding, after a message between hosts has failed
BROKEN, BROKEN_EXPLAINED_S = "", 5.0  # no link has this name; for a finding, after NCCL has refused a message
GRACE_S = 0.7  # from a finding to the end of a process whose main thread is stuck
PATIENCE_S = 1.0  # of a process that ends, for the store
MOST_KEPT = 64  # messages of a link: with more, `issued` drops completed ones itself


class Inquiry:
    """This rank's questions about one message."""

    def __init__(self, number: int, asked_s: float) -> None:
        self.number, self.asked_s = number, asked_s
        self.questions: list[int] = []  # where their numbers are, in board.asked


class BrokenMessage(NamedTuple):
    """A message that a backend has refused, because a connection broke."""

    what: str
    ranks: Sequence[int]


class Watcher:
    """What this process has issued, and who is missing. `issued` and `check` are for the hot path: neither waits."""

    def __init__(
        self, store: dist.Store, rank: int, world: int, *, server: int | None = None, device: torch.device | None = None
    ) -> None:
        """`server` is the rank whose process serves the store, if one does; `device` is this rank's GPU."""
        self.rank, self._world, self._server, self._device = rank, world, server, device
        self.finding: CommError | None = None
        self._links: dict[str, IssuedMessages] = {}
        self._inquiries: dict[str, Inquiry] = {}  # by the name of the link
        self._broken: BrokenMessage | None = None  # handed over by the main thread
        self._shortest_s = float("inf")  # of all time limits that were given
        self._on_abort: list[Callable[[], object]] = []
        self._raised = self._uncaught = False
        self._looked_s = time.monotonic()
        self._wake, self._ended = threading.Event(), False
        self._board = Board(dist.PrefixStore("onefold-watcher", store), rank, self._describe, self._wake.set)
        self._hook_before, sys.excepthook = sys.excepthook, self._excepthook
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="onefold-watcher", daemon=True)
        self._thread.start()

    # -- the hot path --------------------------------------------------------------------------------------------------

    def issued(self, link: str, ranks: Sequence[int], label: Label, done: Callable[[], bool], timeout_s: float) -> None:
        """Counts a message that was issued on a link; `done` becomes true once it has completed on the device.

        `ranks` are global. A name is of one communicator: messages of one number under it are the same on all ranks.
        """
        found = self._links.get(link)
        if found is None:
            found = self._links[link] = IssuedMessages(link, ranks)
        assert found.given is ranks or found.ranks == tuple(ranks), f"the link {link!r} is of {found.ranks}"
        found.count += 1
        found.last = label
        found.unfinished.append(Message(found.count, label, done, timeout_s, time.monotonic()))
        if timeout_s < self._shortest_s:
            self._shortest_s = timeout_s
            self._wake.set()
        if len(found.unfinished) > MOST_KEPT:
            found.drop_completed(self._looked_s)

    def check(self) -> None:
        """Raises the CommError that was found, on every call from then on."""
        if self.finding is not None:
            self._raised = True
            raise CommError(str(self.finding))

    def explain(self, peer: int | None) -> None:
        """A message between hosts has failed: raises what all ranks find. `peer` is the rank whose connection broke; it
        has ended, unless a rank has said why before. None: what is found at the time limit."""
        if peer is not None:
            self._board.publish(f"rank {peer} has ended; look at its output first")
            self._wake.set()
        until_s = time.monotonic() + EXPLAINED_S
        while self.finding is None and time.monotonic() < until_s:
            time.sleep(ALERT_TICK_S / 4)
        self.check()

    def explain_broken(self, ranks: Sequence[int], label: Label, error: Exception) -> None:
        """A backend has refused a message because a connection broke, and does not say whose: raises what all ranks
        find once they were asked."""
        said = (str(error) or type(error).__name__).splitlines()[0]
        self._broken = BrokenMessage(f"{label} has failed: {said}", ranks)
        self._wake.set()
        until_s = time.monotonic() + BROKEN_EXPLAINED_S
        while self.finding is None and time.monotonic() < until_s:
            time.sleep(ALERT_TICK_S / 4)
        self.check()

    # -- its life ------------------------------------------------------------------------------------------------------

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Calls this in the watcher's thread once there is a finding, to end messages that cannot complete."""
        self._on_abort.append(callback)

    @property
    def unfinished(self) -> int:
        """How many messages have not completed."""
        for link in list(self._links.values()):
            link.drop_completed(self._looked_s)
        return sum(len(link.unfinished) for link in list(self._links.values()))

    def drain(self) -> None:
        """Waits until all messages have completed; raises what was found. None waits longer than its time limit."""
        while self.unfinished:
            self.check()
            time.sleep(ALERT_TICK_S / 10)
        self.check()

    def announce(self, error: BaseException) -> None:
        """Tells all ranks that this one ends by an error, unless it is the finding that all have."""
        if self.finding is None and self._is_own_process():
            self._board.publish(obituary(self.rank, error))
            self._board.flush(PATIENCE_S)

    def end(self, how: str) -> None:
        """Tells peers that this rank issues no more messages, and stops watching."""
        if not self._ended and self._is_own_process():
            self._board.leave(how)
            self._board.flush(PATIENCE_S)
            self._ended = True
            self._wake.set()
            self._board.end()
            if sys.excepthook == self._excepthook:
                sys.excepthook = self._hook_before

    def end_at_exit(self) -> None:
        """At the end of the process: one that an exception ends must not hang while it aborts its groups, or in their
        destructors."""
        if self._is_own_process():
            self.end(EXIT)
            if self._uncaught:
                end_process()

    def end_if_failed(self) -> None:
        """The same, if an exception ends the process; otherwise it goes on."""
        if self._uncaught:
            self.end_at_exit()

    def _excepthook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if self._is_own_process():
            self._uncaught, self._raised = issubclass(kind, Exception), True
            with suppress(Exception):
                self.announce(error)
        self._hook_before(kind, error, traceback)

    def _is_own_process(self) -> bool:
        """False in a child that was forked: it has no threads, and must not speak for this rank."""
        return os.getpid() == self._pid

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread has the first GPU, and would make a context there
        while not self._ended:
            self._wake.clear()
            now_s = time.monotonic()
            self._board.interval_s = min(LONGEST_INTERVAL_S, self._shortest_s / 4)
            try:
                sentence = self._look(now_s)
            except Exception as error:  # a watcher must not end in silence
                sentence = f"its watcher has failed: {type(error).__name__}: {error}"
            self._looked_s = now_s
            if sentence:
                self._found(sentence)
                return
            self._wake.wait(self._pause_s(time.monotonic()))

    def _pause_s(self, now_s: float) -> float:
        """Until the next look: an interval, or sooner if a message becomes suspect before."""
        pause_s = self._board.interval_s
        if self._board.alert or self._broken:
            return min(pause_s, ALERT_TICK_S)
        for link in list(self._links.values()):
            if overdue := link.overdue(now_s):
                pause_s = min(pause_s, max(ALERT_TICK_S, _suspect_s(overdue.timeout_s) - overdue.waited_s))
        return pause_s

    def _look(self, now_s: float) -> str:
        """Looks once; returns the finding, if there is one."""
        board, suspects = self._board, False
        if board.finding:
            return board.finding
        if self._broken is not None:
            suspects = True
            if sentence := self._examine_broken(self._broken, now_s):
                return self._publish(sentence)
        for link in list(self._links.values()):
            link.drop_completed(self._looked_s)
            overdue = link.overdue(now_s)
            if overdue is None:
                continue
            if overdue.waited_s >= _suspect_s(overdue.timeout_s):
                suspects = True
                if sentence := self._examine(overdue, now_s):
                    return self._publish(sentence)
            elif board.alert and overdue.waited_s > ALERT_TICK_S:
                suspects = True  # another rank asks, or has left
            if suspects and (departed := gone(overdue, board.beats)):
                return self._publish(f"{departed}; {overdue.waited}")
        board.read(range(self._world) if suspects else ())
        return ""

    def _examine(self, overdue: Overdue, now_s: float) -> str:
        """Asks all ranks about a suspect message; once its time is over, asks again, and names who is behind it."""
        board, late_s = self._board, overdue.waited_s - overdue.timeout_s
        inquiry = self._inquiries.get(overdue.link)
        if inquiry is None or inquiry.number != overdue.number:
            inquiry = self._inquiries[overdue.link] = Inquiry(overdue.number, now_s)
            inquiry.questions.append(board.ask())
        if late_s < 0:
            return ""
        if len(inquiry.questions) == 1:
            inquiry.questions.append(board.ask())
        if why := self._silence():
            return store_silent(overdue.waited, why, self._server)
        if inquiry.questions[1] >= len(board.asked) or board.read_s < now_s - 5 * ALERT_TICK_S:
            return ""
        first, second = (board.asked[at] for at in inquiry.questions)
        answers = [beat.answers for beat in board.beats.values()]
        if any(answer < first for answer in answers) and now_s - inquiry.asked_s < SHORTEST_ANSWER_S:
            return ""
        if any(first <= answer < second for answer in answers) and late_s < SECOND_ANSWER_S:
            return ""  # it has answered before, so it will again, or has ended since
        return diagnose(overdue, board.beats, second)

    def _examine_broken(self, broken: BrokenMessage, now_s: float) -> str:
        """Asks all ranks after a connection broke; once those that live have had time to answer, names the others."""
        board, inquiry = self._board, self._inquiries.get(BROKEN)
        if inquiry is None:
            inquiry = self._inquiries[BROKEN] = Inquiry(0, now_s)
            inquiry.questions.append(board.ask())
        if now_s - inquiry.asked_s < SHORTEST_ANSWER_S:
            return ""
        if why := self._silence():
            return store_silent(broken.what, why, self._server)
        (question,) = inquiry.questions
        if question >= len(board.asked) or board.read_s < now_s - 5 * ALERT_TICK_S:
            return ""
        return connection_lost(broken.what, broken.ranks, board.beats, board.asked[question])

    def _silence(self) -> str:
        """Says how the store does not answer; empty if it does."""
        silent_s = time.monotonic() - self._board.answered_s
        too_long = silent_s > max(SHORTEST_ANSWER_S, 2 * self._board.interval_s)
        return self._board.lost or (f"for {silent_s:.1f} s" if too_long else "")

    def _publish(self, sentence: str) -> str:
        """The finding of all ranks: this one, unless another rank was first."""
        if self._silence():
            return sentence  # nobody can read it, and all come to the same
        self._board.publish(sentence)
        self._board.flush(PATIENCE_S)
        return self._board.finding or sentence

    def _found(self, sentence: str) -> None:
        """Makes `check` raise, aborts the groups, and ends the process if its main thread is stuck."""
        found_s = time.monotonic()
        self.finding = CommError(f"rank {self.rank}: {sentence}")
        record_hang(self.rank, self._world, sentence, list(self._links.values()))
        for callback in self._on_abort:
            threading.Thread(target=callback, name="onefold-abort", daemon=True).start()  # it may block
        while not (self._raised or self._ended):
            if time.monotonic() - found_s > GRACE_S and self.unfinished:
                break
            time.sleep(ALERT_TICK_S)
        else:
            return
        sys.stderr.write(f"onefold: {visible(self.finding)}\n")
        end_process()

    def _describe(self, question: int, left: str) -> Beat:
        """What this rank says of itself."""
        now_s, links = time.monotonic(), list(self._links.values())
        positions = {link.name: Position(link.count, str(link.last or "")) for link in links}
        waits = (link.overdue(now_s) for link in links)
        return Beat(question, positions, tuple(one for one in waits if one and one.waited_s > ALERT_TICK_S), left)


def _suspect_s(timeout_s: float) -> float:
    """The age at which ranks are asked about a message, so that they have answered when its time is over."""
    return timeout_s - min(LONGEST_ANSWER_S, timeout_s / 2)


def end_process() -> None:
    """Ends this process at once with code 1, whatever its threads do."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
