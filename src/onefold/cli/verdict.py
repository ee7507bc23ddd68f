"""Which rank failed first, and why: one line, from the errors that ranks reported and from how their processes ended.

When one rank is lost the others notice, and a moment later fail too. Those errors are consequences, so causes are
ordered: a rank's own end or error first, the earliest of them; then what all ranks found together; then a rank that is
stopped; then one that exited with 0 too early; last, which rank missed which.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onefold.comm.last_words import Level


class ReportedError(NamedTuple):
    """An error that a rank reported before it ended."""

    rank: int
    message: str
    level: Level
    kind: str  # the class of the error
    at_s: float


class Exit(NamedTuple):
    """The exit code of a rank's process; below 0, the number of the signal that ended it."""

    rank: int
    code: int
    at_s: float


class Outcome(NamedTuple):
    """How the ranks ended. Code 0: every rank exited with 0."""

    code: int
    message: str = ""
    kind: str = ""  # the class of the error, where a rank reported one
    lost: bool = False  # a rank was lost: another start may help
    signals: tuple[str, ...] = ()  # what ended the run early, in words

    @property
    def good(self) -> bool:
        return self.code == 0


def cause_known(errors: Iterable[ReportedError], exits: Iterable[Exit]) -> bool:
    """True once a rank has reported an error of its own, or has ended without a report."""
    return bool(_own(list(errors), exits))


def _own(errors: Sequence[ReportedError], exits: Iterable[Exit]) -> list[tuple[float, Outcome]]:
    """When and how ranks failed for a reason of their own, not because a peer failed."""
    failed = [(error.at_s, Outcome(1, error.message, error.kind)) for error in errors if error.level is Level.OWN]
    return failed + [(end.at_s, Outcome(1, how_it_ended(end), lost=True)) for end in _untold(errors, exits)]


def _untold(errors: Sequence[ReportedError], exits: Iterable[Exit]) -> list[Exit]:
    """The ends of ranks that reported no error."""
    reported = {error.rank for error in errors}
    return [end for end in exits if end.code < 0 or (end.code > 0 and end.rank not in reported)]


def lost_ranks(errors: Sequence[ReportedError], exits: Sequence[Exit]) -> set[int]:
    """The ranks that were lost: the first that ended without a report, and those that were killed too. Others that
    ended may have failed because these did, as NCCL aborts a process whose peer is gone. `exits` are in order."""
    ends = _untold(errors, exits)
    return {end.rank for end in ends if end is ends[0] or end.code == -signal.SIGKILL}


def verdict(
    errors: Sequence[ReportedError], exits: Sequence[Exit], stopped: Mapping[int, float], timeout_s: float
) -> Outcome:
    """The outcome of a start that failed: the rank that failed first, and why.

    `exits`: ranks that ended before the launcher ended them. `stopped`: rank → seconds since a signal stopped it.
    """
    if own := _own(errors, exits):
        return min(own)[1]
    for error in errors:
        if error.level is Level.AGREED:
            return Outcome(1, error.message, error.kind)
    if stopped:
        rank = max(stopped, key=lambda one: stopped[one])
        return Outcome(
            1, f"rank {rank} was stopped by a signal (SIGSTOP or SIGTSTP) and has not answered for {timeout_s:g} s",
            lost=True,
        )  # fmt: skip
    early = [end for end in exits if end.code == 0]
    if early and errors:
        return Outcome(1, f"rank {early[0].rank} ended, with exit code 0, while others waited for it", lost=True)
    if errors:
        return Outcome(1, errors[0].message, errors[0].kind, lost=True)
    return Outcome(1, "the ranks ended without reporting an error; see their output above", lost=True)


def how_it_ended(end: Exit) -> str:
    """
    >>> how_it_ended(Exit(1, -9, 0.0))
    'rank 1 was killed by SIGKILL'
    """
    if end.code < 0:
        return f"rank {end.rank} was killed by {signal_name(-end.code)}"
    return f"rank {end.rank} ended with exit code {end.code}; see its output above"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
