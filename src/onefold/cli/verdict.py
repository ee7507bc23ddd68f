"""Who ended first, and why: one line made of what ranks said and how their processes ended. No processes here.

When one rank is lost the others notice, and end by errors of their own a moment later. What they say is true and
beside the point, so causes are ordered: a rank's own end or error first, the earliest of them; then what all ranks
found together; then a rank that is stopped; then one that ended well too early; last, who missed whom.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onefold.cli.lifeline import Level


class Word(NamedTuple):
    """An error that a rank told of before it ended."""

    rank: int
    message: str
    level: Level
    kind: str  # the class of the error
    at_s: float


class Exit(NamedTuple):
    """The end of a rank's process, as the system tells it: below 0 the number of a signal."""

    rank: int
    code: int
    at_s: float


class Outcome(NamedTuple):
    """How the ranks ended; without a message, well."""

    code: int
    message: str = ""
    kind: str = ""  # the class of the error, where a rank told of one
    lost: bool = False  # a rank was lost: another start may help
    signals: tuple[str, ...] = ()  # what ended the run early, in words

    @property
    def good(self) -> bool:
        return self.code == 0


def verdict(words: Sequence[Word], exits: Sequence[Exit], stopped: Mapping[int, float], timeout_s: float) -> Outcome:
    """Of a failed start. `exits`: ranks that ended before we ended them. `stopped`: for how many seconds a rank was."""
    told = {word.rank for word in words}
    first = min(
        [(word.at_s, Outcome(1, word.message, word.kind)) for word in words if word.level is Level.OWN]
        + [
            (end.at_s, Outcome(1, how_it_ended(end), lost=True))
            for end in exits
            if end.code < 0 or (end.code > 0 and end.rank not in told)
        ],
        default=None,
    )
    if first is not None:
        return first[1]
    for word in words:
        if word.level is Level.AGREED:
            return Outcome(1, word.message, word.kind)
    if stopped:
        rank = max(stopped, key=lambda one: stopped[one])
        return Outcome(
            1, f"rank {rank} was stopped by a signal (SIGSTOP or SIGTSTP) and has not answered for {timeout_s:g} s",
            lost=True,
        )  # fmt: skip
    early = [end for end in exits if end.code == 0]
    if early and words:
        return Outcome(1, f"rank {early[0].rank} ended, with exit code 0, while others waited for it", lost=True)
    if words:
        return Outcome(1, words[0].message, lost=True)
    return Outcome(1, "the ranks ended without a word; what they said stands above", lost=True)


def how_it_ended(end: Exit) -> str:
    """
    >>> how_it_ended(Exit(1, -9, 0.0))
    'rank 1 was killed by SIGKILL'
    """
    if end.code < 0:
        return f"rank {end.rank} was killed by {signal_name(-end.code)}"
    return f"rank {end.rank} ended with exit code {end.code}; what it said stands above"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
