"""Runs a command as local ranks, from their start to their end.

The launcher starts the ranks, forwards signals and waits until the current step is saved, restarts all ranks when one
was lost, kills all when one has failed or does not answer, and prints which rank failed first. No rank outlives it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from onefold.cli.lifeline import PREPARING, Lifeline
from onefold.cli.ranks import Ranks, Said, started
from onefold.cli.verdict import Exit, Outcome, ReportedError, cause_known, lost_ranks, signal_name, verdict
from onefold.comm.last_words import Level, tell_last_words
from onefold.comm.watching import current_watcher
from onefold.errors import OnefoldError, visible
from onefold.train.run.stop import Stop

COMMAND = Path(__file__).parents[2] / "onefold_command.py"  # beside the package, wherever that is installed
TICK_S = 0.05
GRACE_KNOWN_S = 0.2  # from the first failure to the end of all ranks, once its cause is known
GRACE_UNKNOWN_S = 1.0  # the same while the rank that caused it may still report


def is_rank() -> bool:
    return "RANK" in os.environ


def onefold_command(*arguments: str) -> list[str]:
    """The command line of this program with other arguments; by its path, since `python -m` would import from the
    current folder first."""
    return [sys.executable, str(COMMAND), *arguments]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started on local ranks, and how long they may take to end."""

    ranks: int
    command: Sequence[str]
    max_restarts: int = 0
    elastic: Sequence[int] = ()  # numbers of ranks with which the run may go on after some were lost
    timeout_s: float = 600.0  # how long a rank may be stopped by SIGSTOP
    shutdown_s: float = 0.0  # how long ranks have after a signal, to finish their step and save
    forwards_signals: bool = False  # the command is a user's program: it gets the signal itself
    files: Sequence[str] = ()  # private files that the ranks read: see ranks.private_file


def run_ranks(ranks: int, arguments: Sequence[str]) -> Any:
    """Run `onefold ARGUMENTS` on local ranks; returns the result that rank 0 sent. Raises what a rank reported."""
    launcher = Launcher(Launch(ranks=ranks, command=onefold_command(*arguments)))
    outcome = launcher.run()
    if outcome.code > 128:
        say(outcome.message)
        sys.exit(outcome.code)
    if not outcome.good or launcher.result is None:
        raise OnefoldError(outcome.message or "the ranks ended without a result; see their output above")
    return launcher.result


def report_and_exit(line: Lifeline, error: Exception) -> NoReturn:
    """Called on a rank: report the error to the launcher and exit with code 1 at once, so that no peer waits."""
    rank = int(os.environ["RANK"])
    if watcher := current_watcher():
        watcher.announce(error)
    tell_last_words(error)
    known = isinstance(error, OnefoldError)
    if not known:
        traceback.print_exc()
    message = str(error) if known else f"rank {rank}: {type(error).__name__}: {error}"
    if line.launched:
        line.say({"error": message, "level": Level.of(error), "kind": type(error).__name__})
    else:
        say(message if message.startswith("rank ") else f"rank {rank}: {message}")
    sys.stdout.flush()
    os._exit(1)


class Launcher:
    """Ranks of one command, through all their starts."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.result: Any = None  # what rank 0 sent

    def run(self) -> Outcome:
        launch, most, again = self._launch, self._launch.max_restarts, 0
        with Stop(ends_at_second=False) as stop:
            for restart in count():
                start = Start(launch, restart, stop)
                outcome = start.run()
                self.result = start.result
                passing = launch.forwards_signals and again < most  # a script's error may not come again
                if outcome.good or stop.asked or not (outcome.lost or passing):
                    return outcome
                left = max((n for n in launch.elastic if outcome.lost and n <= launch.ranks - start.lost), default=None)
                if left is not None:
                    say(f"a rank was lost ({outcome.message}); going on with {left} of {launch.ranks} ranks")
                    launch = replace(launch, ranks=left)
                elif again < most:
                    again += 1
                    what = "a rank was lost" if outcome.lost else "a rank failed"
                    say(f"{what} ({outcome.message}); restart {again} of {most}")
                else:
                    return outcome
        raise AssertionError("unreachable")


class Start:
    """One start of all ranks."""

    def __init__(self, launch: Launch, restart: int, stop: Stop) -> None:
        self._launch, self._restart, self._stop = launch, restart, stop
        self._errors: list[ReportedError] = []
        self._exits: dict[int, Exit] = {}
        self._phases = [PREPARING] * launch.ranks
        self._signals: list[str] = []
        self._stopping_s: float | None = None
        self.result: Any = None  # what rank 0 sent
        self.lost = 0  # ranks that ended for no reason that they told

    def run(self) -> Outcome:
        launch = self._launch
        own = not launch.forwards_signals  # else it is a user's program
        with started(launch.ranks, launch.command, restart=self._restart, own=own, files=launch.files) as ranks:
            decided = self._watch(ranks)
            self._poll(ranks)
            stopped = {rank.rank: time.monotonic() - rank.stopped_s for rank in ranks if rank.stopped_s is not None}
            for said in ranks.end():
                self._handle(said)
        exits = sorted(self._exits.values(), key=lambda end: end.at_s)
        if decided is None and len(exits) == launch.ranks and not any(end.code for end in exits):
            decided = Outcome(0)
        if decided is None and launch.forwards_signals and self._stopping_s is not None:
            decided = Outcome(128 + self._stop.number, f"ended by {self._signal_name()}")
        if decided is None:
            decided = verdict(self._errors, exits, stopped, launch.timeout_s)
        self.lost = max(1, len(lost_ranks(self._errors, exits) | set(stopped)))
        return decided._replace(signals=tuple(self._signals))

    def _watch(self, ranks: Ranks) -> Outcome | None:
        """Waits until every rank has exited, or all must be killed; returns an outcome if a signal decides it."""
        failed_s = None
        while len(self._exits) < self._launch.ranks:
            for said in ranks.listen(TICK_S):
                self._handle(said)
            self._poll(ranks)
            now = time.monotonic()
            if self._stop.asked and self._stopping_s is None:
                self._stopping_s = now
                if (ended := self._forward_signal(ranks)) is not None:
                    return ended
            if self._stop.asked_again:
                return Outcome(
                    128 + self._stop.number, f"ended by a second {self._signal_name()}: nothing more was saved"
                )
            if self._stopping_s is not None and now - self._stopping_s >= self._launch.shutdown_s:
                late = f"the ranks had not ended {self._launch.shutdown_s:g} s after {self._signal_name()}"
                lost = "" if self._launch.forwards_signals else "not saved: "
                return Outcome(128 + self._stop.number, f"{lost}{late} (--shutdown-s)")
            if any(rank.stopped_s and now - rank.stopped_s >= self._launch.timeout_s for rank in ranks):
                return None
            ends_itself = self._launch.forwards_signals and self._stopping_s is not None  # each rank in its own time
            if not ends_itself and (self._errors or any(end.code for end in self._exits.values())):
                failed_s = failed_s or now
                known = cause_known(self._errors, self._exits.values())
                if now - failed_s > (GRACE_KNOWN_S if known else GRACE_UNKNOWN_S):
                    return None
        return None

    def _forward_signal(self, ranks: Ranks) -> Outcome | None:
        """Called after a signal: ranks that train finish their step and save.

        While a rank has not come to its first step all are ended at once: there is nothing to save, except where ranks
        go on after others were lost. Those restore what may be in memory alone, take a step and save.
        """
        if self._launch.forwards_signals:
            for rank in ranks:
                rank.signal(self._stop.number)
        elif PREPARING in self._phases and not (self._restart and self._launch.elastic):
            early = ", before the first step of this start: nothing is lost" if self._launch.shutdown_s else ""
            return Outcome(128 + self._stop.number, f"ended by {self._signal_name()}{early}")
        else:
            self._signals.append(self._signal_name())
            for rank in ranks:
                rank.tell_to_stop()
        return None

    def _signal_name(self) -> str:
        return signal_name(self._stop.number)

    def _poll(self, ranks: Ranks) -> None:
        """Updates which ranks have ended, and which are stopped (SIGSTOP)."""
        for rank in ranks:
            rank.update_stopped()
            if rank.rank not in self._exits and (code := rank.process.poll()) is not None:
                self._exits[rank.rank] = Exit(rank.rank, code, time.monotonic())
                rank.end()  # at once, while no other process can have its number: what it had started

    def _handle(self, said: Said) -> None:
        what = json.loads(said.text)
        if "phase" in what:
            self._phases[said.rank] = what["phase"]
        elif "signal" in what:
            self._signals.append(f"{what['signal']} to rank {said.rank}")
        elif "error" in what:
            level = Level(what["level"])
            self._errors.append(ReportedError(said.rank, what["error"], level, what["kind"], at_s=time.monotonic()))
        elif "result" in what:
            self.result = what["result"]


def say(message: str) -> None:
    sys.stderr.write(f"onefold: {visible(message)}\n")
    sys.stderr.flush()


def remark(message: str) -> None:
    """What a person may like to know while waiting: on a terminal only."""
    if sys.stderr.isatty():
        say(message)
