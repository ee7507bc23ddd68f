"""Whose turn it is, and what came of it: one way to run systems against each other, under three schedules.

`together`: the processes of all systems are alive and take turns step by step, A B C, B C A, …; those whose turn it is
not are blocked. So drift of the machine hits all alike, and steps of one round can be compared in pairs.
`resting`: all are alive too, but memory holds the activations of one system only. So a turn is several steps, of which
the first after a rest does not count, and a system that rests gives the device memory back that it only cached.
`one_by_one`: where memory holds one system only, each is started, trained and ended in its turn, some times around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.crew import Crew, CrewFailed
from benchmarks.work import Work


class Turn(NamedTuple):
    system: str
    life: int  # which start of this system's processes it belongs to
    steps: int
    last: bool  # the processes end with it
    warm: int = 0  # of the steps, how many do not count
    rests: bool = False  # the processes then give cached device memory back


class Step(NamedTuple):
    """One step of all ranks of a system."""

    life: int
    step: int
    seconds: float  # of the slowest rank
    losses: list[float]  # by rank
    sent_bytes: int | None = None  # by all ranks, where it is counted
    counts: bool = True  # among the measured ones, once warm-up is over


class Record:
    """All that is known of one system."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []  # of each life, of the rank that needed most
        self.steps: list[Step] = []
        self.finished: list[dict[str, Any]] = []
        self.error: str | None = None


Hear = Callable[[str, str, Any], None]  # system, what, found: called as it comes


def together(systems: Sequence[str], *, steps: int) -> Iterator[Turn]:
    for number in range(steps):
        for system in rotated(systems, number):
            yield Turn(system, 0, 1, number == steps - 1)


def resting(systems: Sequence[str], *, warm_up: int, steps: int, rounds: int) -> Iterator[Turn]:
    for number in range(rounds):
        warm = 1 if number else warm_up
        for system in rotated(systems, number):
            yield Turn(system, 0, warm + steps, number == rounds - 1, warm, rests=True)


def one_by_one(systems: Sequence[str], *, steps: int, rounds: int) -> Iterator[Turn]:
    for life in range(rounds):
        for system in rotated(systems, life):
            yield Turn(system, life, steps, True)


def rotated(systems: Sequence[str], by: int) -> list[str]:
    start = by % len(systems)
    return [*systems[start:], *systems[:start]]


def run(
    work: Work, turns: Iterator[Turn], records: dict[str, Record], *, timeout_s: float, hear: Hear,
    counts_wire: bool = False, environ: Mapping[str, str] | None = None, at_once: Sequence[str] = (),
) -> None:  # fmt: skip
    """Take all turns and record them. A system that fails is out, and the others go on.

    Those named in `at_once` start together before the first turn, which takes the time of the slowest.
    """
    alive: dict[str, Crew] = {}
    with ExitStack() as stack:

        def start(system: str) -> None:
            alive[system] = Crew(work, system, timeout_s=timeout_s, counts_wire=counts_wire, environ=environ)
            stack.callback(alive[system].close)

        def build(system: str, record: Record) -> None:
            try:
                record.built.append(most(alive[system].hear()))
                hear(system, "built", record.built[-1])
            except CrewFailed as error:
                fail(system, record, error)

        def fail(system: str, record: Record, error: CrewFailed) -> None:
            record.error = str(error)
            hear(system, "failed", f"{error.told}{error}")

        for system in at_once:
            start(system)
        for system in at_once:
            build(system, records.setdefault(system, Record()))
        for turn in turns:
            record = records.setdefault(turn.system, Record())
            if record.error:
                continue
            if turn.system not in alive:
                start(turn.system)
                build(turn.system, record)
            if not record.error:
                try:
                    take(alive[turn.system], turn, record, hear)
                except CrewFailed as error:
                    fail(turn.system, record, error)
            if turn.last or record.error:
                alive.pop(turn.system).close()


def take(crew: Crew, turn: Turn, record: Record, hear: Hear) -> None:
    crew.ask(f"step {turn.steps}")
    for number in range(turn.steps):
        heard = crew.hear()
        sent = heard[0].get("sent_bytes")
        seconds = max(rank["seconds"] for rank in heard)
        step = Step(turn.life, heard[0]["step"], seconds, [rank["loss"] for rank in heard], sent, number >= turn.warm)
        record.steps.append(step)
        hear(turn.system, "stepped", step._asdict())
    if turn.rests and not turn.last:
        crew.ask("rest")
        crew.hear()
    if turn.last:
        crew.ask("finish")
        record.finished.append(most(crew.hear()))
        hear(turn.system, "finished", record.finished[-1])


def most(heard: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure the largest over ranks; of words those of rank 0."""
    first = heard[0]
    return {key: first[key] if isinstance(first[key], str) else max(rank[key] for rank in heard) for key in first}
