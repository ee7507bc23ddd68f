"""Who keeps a message from completing: what ranks say of themselves in, one sentence out. No processes, no clocks.

A message is number k on its link on every rank, so a rank that has issued fewer than k messages there has not come to
it. A rank that does not answer a question has ended or is stopped. A rank that has not come to a message because it
waits on another link is not the cause: the rank that it waits for is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onefold.comm.meter import Label
from onefold.errors import CommError

LOOK = "look at {}'s output first"
MOST_NAMED = 8
SHUTDOWN, EXIT = "shutdown()", "exit"  # how a rank left


class Position(NamedTuple):
    """How many messages a rank has issued on one link, and what the last was."""

    issued: int
    last: str


NOWHERE = Position(0, "")


class Overdue(NamedTuple):
    """The oldest message of a link, which has not completed."""

    link: str
    ranks: tuple[int, ...]  # global ranks of the link
    number: int  # of this message on its link, from 1
    label: Label
    timeout_s: float
    waited_s: float

    def __str__(self) -> str:
        return f"{self.label}, message {self.number} on the link {self.link}"

    @property
    def waited(self) -> str:
        return f"{self} has not completed for {self.waited_s:.1f} s (timeout_s={self.timeout_s:g})"


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself."""

    answers: int = 0  # the newest question that it has heard
    links: Mapping[str, Position] = field(default_factory=dict)
    waits: tuple[Overdue, ...] = ()  # messages that it has waited for
    left: str = ""  # how it left, SHUTDOWN or EXIT; empty while it takes part

    def encode(self) -> str:
        return json.dumps({"answers": self.answers, "links": self.links, "waits": self.waits, "left": self.left})

    @classmethod
    def decode(cls, text: bytes | str) -> Beat:
        said = json.loads(text)
        links = {name: Position(*at) for name, at in said["links"].items()}
        waits = (
            Overdue(link, tuple(ranks), number, Label(*label), timeout_s, waited_s)
            for link, ranks, number, label, timeout_s, waited_s in said["waits"]
        )
        return cls(said["answers"], links, tuple(waits), said["left"])


def diagnose(overdue: Overdue, beats: Mapping[int, Beat], question: int) -> str:
    """Names the ranks that keep a message from completing; `beats` are what ranks said after `question` was asked."""
    named = _cause(overdue, beats, question, frozenset())
    if not named:
        silent = [rank for rank, beat in sorted(beats.items()) if not beat.left and beat.answers < question]
        named = _stopped(silent) if silent else ""
    return f"{named}; {overdue.waited}" if named else (
        f"{overdue.waited}, and all of its ranks ({_names(overdue.ranks)}) have come to it: the network hangs, or the "
        f"device of a rank does; look at the network between them, and run with NCCL_DEBUG=INFO"
    )  # fmt: skip


def _cause(overdue: Overdue, beats: Mapping[int, Beat], question: int, followed: frozenset[int]) -> str:
    """Names the ranks behind a message, through what a late rank waits for itself; empty if all came to it."""
    known = {rank: beats.get(rank, Beat()) for rank in overdue.ranks}
    if departed := gone(overdue, known):
        return departed
    if silent := [rank for rank, beat in known.items() if not beat.left and beat.answers < question]:
        return _stopped(silent)
    late = [rank for rank in known if _at(known[rank], overdue).issued < overdue.number]
    for rank in set(late) - followed:
        for behind in known[rank].waits:
            if deeper := _cause(behind, beats, question, followed | {rank}):
                return deeper
    if late:
        who, at = _names(late), _at(known[late[0]], overdue)
        verb, of = ("have", f" of rank {late[0]}") if len(late) > 1 else ("has", "")
        return (
            f"{who} {verb} not come to message {overdue.number} on the link {overdue.link}, {overdue.label} (the last "
            f"there{of} was {at.last or 'none'}, message {at.issued}); {LOOK.format(who)}"
        )
    left = [rank for rank, beat in known.items() if beat.left]
    return f"{_departure(left[0], known[left[0]])}; {LOOK.format(_names(left[:1]))}" if left else ""


def _stopped(ranks: list[int]) -> str:
    who = _names(ranks)
    verb = "have ended or are stopped" if len(ranks) > 1 else "has ended or is stopped"
    return f"{who} {verb}, nothing is heard from there; {LOOK.format(who)}"


def gone(overdue: Overdue, beats: Mapping[int, Beat]) -> str:
    """Names a rank that left before it came to the message, so that it can never complete; else an empty string."""
    for rank in overdue.ranks:
        beat = beats.get(rank, Beat())
        if beat.left and _at(beat, overdue).issued < overdue.number:
            return f"{_departure(rank, beat)} and has not come to {overdue}; {LOOK.format(f'rank {rank}')}"
    return ""


def connection_lost(what: str, ranks: Sequence[int], beats: Mapping[int, Beat], question: int) -> str:
    """Names the ranks behind a message that failed because a connection broke; `what` says which, and how."""
    if left := [rank for rank in ranks if beats.get(rank, Beat()).left]:
        return f"{_departure(left[0], beats[left[0]])}; {LOOK.format(_names(left[:1]))}; {what}"
    if silent := [rank for rank in ranks if beats.get(rank, Beat()).answers < question]:
        return f"{_stopped(silent)}; {what}"
    return f"{what}, and all of its ranks ({_names(tuple(ranks))}) are there: look at the network between them"


def store_silent(what: str, why: str, server: int | None) -> str:
    """Names the rank that serves the store, if one does, where the store does not answer either; `what` says which
    message has not completed."""
    if server is None:
        return f"{what}, and the store through which ranks find each other does not answer ({why})"
    return (
        f"rank {server} has ended or is stopped: the store that it serves does not answer ({why}); "
        f"{LOOK.format(f'rank {server}')}; {what}"
    )


def obituary(rank: int, error: BaseException) -> str:
    """What peers are told of an exception that nothing caught."""
    said = (str(error).strip().splitlines() or [""])[0].removeprefix(f"rank {rank}: ")
    if isinstance(error, CommError):
        return f"{said} (found by rank {rank})"  # another rank is the cause, which it names
    return f"rank {rank} has ended by {type(error).__name__}{': ' * bool(said)}{said}; {LOOK.format(f'rank {rank}')}"


def _at(beat: Beat, overdue: Overdue) -> Position:
    return beat.links.get(overdue.link, NOWHERE)


def _departure(rank: int, beat: Beat) -> str:
    return f"rank {rank} has called shutdown()" if beat.left == SHUTDOWN else f"rank {rank} has ended ({beat.left})"


def _names(ranks: list[int] | tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + ", …" * (len(ranks) > MOST_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
