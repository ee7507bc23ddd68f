"""Runs a command as local ranks, from their start to their end, unless this process is one of them already.

The launcher starts them, passes a signal on and waits for the step in hand to be saved, starts lost ranks again, ends
all when one has failed or does not answer, and says once who was first. Nothing outlives it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from onefold.cli.lifeline import PREPARING, Level, Lifeline
from onefold.cli.ranks import Ranks, Said, started
from onefold.cli.verdict import Exit, Outcome, Word, signal_name, verdict
from onefold.errors import CommError, MismatchError, OnefoldError
from onefold.train.stop import Stop
from onefold.visible import visible

TICK_S = 0.05
GRACE_S = {True: 0.2, False: 1.0}  # from a failure until all are ended: if its cause is known, and if not


def is_rank() -> bool:
    return "RANK" in os.environ


def onefold_command(*arguments: str) -> list[str]:
    """This program again, with other arguments."""
    return [sys.executable, "-m", "onefold.cli.main", *arguments]


def run_ranks(ranks: int, arguments: Sequence[str]) -> Any:
    """Run `onefold ARGUMENTS` on local ranks; what rank 0 found. Raises what a rank said went wrong."""
    launcher = Launcher(ranks, onefold_command(*arguments))
    outcome = launcher.run()
    if not outcome.good or launcher.result is None:
        raise OnefoldError(outcome.message or "the ranks ended without a result; what they said stands above")
    return launcher.result


def give_up(line: Lifeline, error: Exception) -> NoReturn:
    """Of a rank: say why, and end at once. Peers must not wait, and nothing half done is to be saved."""
    rank = int(os.environ["RANK"])
    known = isinstance(error, OnefoldError)
    found_by = {CommError: Level.PEER, MismatchError: Level.AGREED}
    level = next((level for kind, level in found_by.items() if isinstance(error, kind)), Level.OWN)
    if not known:
        traceback.print_exc()
    message = str(error) if known else f"rank {rank}: {type(error).__name__}: {error}"
    if line.launched:
        line.say({"error": message, "level": level, "kind": type(error).__name__})
    else:
        say(message if message.startswith("rank ") else f"rank {rank}: {message}")
    sys.stdout.flush()
    os._exit(1)


class Launcher:
    """Ranks of one command, through all their starts."""

    def __init__(
        self, ranks: int, command: Sequence[str], *, max_restarts: int = 0, timeout_s: float = 600.0,
        shutdown_s: float = 0.0, passes_signals: bool = False, files: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`timeout_s`: how long a rank may be stopped. `shutdown_s`: how long ranks that train have after a signal;
        with `passes_signals` they are programs of the user's and get the signal itself. `files`: see ranks.started."""
        self._count, self._command, self._environment, self._files = ranks, command, environment or {}, files
        self._max_restarts, self._timeout_s, self._shutdown_s = max_restarts, timeout_s, shutdown_s
        self._passes_signals = passes_signals
        self.result: Any = None  # what rank 0 found

    def run(self) -> Outcome:
        with Stop() as stop:
            for restart in range(self._max_restarts + 1):
                outcome = Start(self, restart, stop).run()
                if outcome.good or not outcome.lost or stop.asked or restart == self._max_restarts:
                    return outcome
                say(
                    f"a rank was lost ({outcome.message}); start {restart + 1} of {self._max_restarts} again, from the "
                    f"last checkpoint"
                )
        raise AssertionError("unreachable")


class Start:
    """One start of all ranks."""

    def __init__(self, launcher: Launcher, restart: int, stop: Stop) -> None:
        self._launcher, self._restart, self._stop = launcher, restart, stop
        self._words: list[Word] = []
        self._exits: dict[int, Exit] = {}
        self._phases = [PREPARING] * launcher._count
        self._signals: list[str] = []
        self._stopping_s: float | None = None

    def run(self) -> Outcome:
        launcher = self._launcher
        with started(
            launcher._count, launcher._command, restart=self._restart, environment=launcher._environment,
            files=launcher._files,
        ) as ranks:  # fmt: skip
            early = self._watch(ranks)
            self._look(ranks)
            stopped = {rank.rank: time.monotonic() - rank.stopped_s for rank in ranks if rank.stopped_s is not None}
            for said in ranks.end():
                self._understand(said)
        signals = tuple(self._signals)
        if early is not None:
            return early._replace(signals=signals)
        if all(self._exits.get(rank, Exit(rank, 1, 0.0)).code == 0 for rank in range(launcher._count)):
            return Outcome(0, signals=signals)
        ends = sorted(self._exits.values(), key=lambda end: end.at_s)
        return verdict(self._words, ends, stopped, launcher._timeout_s)._replace(signals=signals)

    def _watch(self, ranks: Ranks) -> Outcome | None:
        """Until all have ended, or should; an outcome where a signal decides it."""
        failed_s = None
        while len(self._exits) < self._launcher._count:
            for said in ranks.listen(TICK_S):
                self._understand(said)
            self._look(ranks)
            now = time.monotonic()
            if self._stop.asked and self._stopping_s is None:
                self._stopping_s = now
                if (ended := self._pass_on(ranks)) is not None:
                    return ended
            if self._stopping_s is not None and now - self._stopping_s >= self._launcher._shutdown_s:
                late = f"the ranks had not ended {self._launcher._shutdown_s:g} s after {self._name()}"
                return Outcome(128 + self._stop.number, late)
            if any(rank.stopped_s and now - rank.stopped_s >= self._launcher._timeout_s for rank in ranks):
                return None
            if self._words or any(end.code for end in self._exits.values()):
                failed_s = failed_s or now
                if now - failed_s > GRACE_S[self._known]:
                    return None
        return None

    @property
    def _known(self) -> bool:
        """A rank told of an error of its own, or ended without a word: what others say will be about that."""
        told = {word.rank for word in self._words}
        lost = any(end.code < 0 or (end.code and end.rank not in told) for end in self._exits.values())
        return lost or any(word.level is Level.OWN for word in self._words)

    def _pass_on(self, ranks: Ranks) -> Outcome | None:
        """A signal came: ranks that train finish their step and save; where one does not yet, nothing is lost."""
        if self._launcher._passes_signals:
            for rank in ranks:
                rank.signal(self._stop.number)
        elif PREPARING in self._phases:
            early = ", before the first step of this start: nothing is lost" if self._launcher._shutdown_s else ""
            return Outcome(128 + self._stop.number, f"ended by {self._name()}{early}")
        else:
            self._signals.append(f"{self._name()}")
            for rank in ranks:
                rank.tell_to_stop()
        return None

    def _name(self) -> str:
        return signal_name(self._stop.number)

    def _look(self, ranks: Ranks) -> None:
        """Which have ended, and which are stopped."""
        for rank in ranks:
            rank.look()
            if rank.rank not in self._exits and (code := rank.process.poll()) is not None:
                self._exits[rank.rank] = Exit(rank.rank, code, time.monotonic())

    def _understand(self, said: Said) -> None:
        what = json.loads(said.text)
        if "phase" in what:
            self._phases[said.rank] = what["phase"]
        elif "signal" in what:
            self._signals.append(f"{what['signal']} to rank {said.rank}")
        elif "error" in what:
            self._words.append(
                Word(said.rank, what["error"], Level(what["level"]), what["kind"], at_s=time.monotonic())
            )
        elif "result" in what:
            self._launcher.result = what["result"]


def say(message: str) -> None:
    sys.stderr.write(f"onefold: {visible(message)}\n")
    sys.stderr.flush()
