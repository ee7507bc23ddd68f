"""How a distributed test fails: some ranks raised or died, or nobody came back in time."""

import signal
from typing import NamedTuple

from tests.harness.packed_calls import Died, Raised


class CaughtError(NamedTuple):
    """An exception that a test expected."""

    type_name: str
    message: str
    seconds: float


class RankError(NamedTuple):
    """Why one rank failed. `type_name` is "Died" for a process that ended without a word."""

    rank: int
    type_name: str
    message: str
    traceback: str


class RankFailure(Exception):
    """Some ranks raised or died. `errors` starts with the rank that failed first."""

    def __init__(self, name: str, errors: list[RankError], stuck: dict[int, str]) -> None:
        self.errors = errors
        self.stuck = stuck
        first = errors[0]
        parts = [f"{name}: rank {first.rank} failed first: {first.type_name}: {first.message}"]
        parts += [f"--- rank {error.rank} ---\n{error.traceback}" for error in errors]
        parts += [f"--- rank {rank} had not finished; its stack ---\n{stack}" for rank, stack in stuck.items()]
        super().__init__("\n".join(parts))


class RankHang(Exception):
    """Some ranks were still running at the time limit; every rank's stack is in `stacks` and in the message."""

    def __init__(self, name: str, timeout_s: float, waiting: list[int], stacks: dict[int, str], said: str = "") -> None:
        self.waiting = waiting
        self.stacks = stacks
        parts = [f"{name}: ranks {waiting} had not finished after {timeout_s:g} s"]
        for rank, stack in stacks.items():
            parts.append(f"--- rank {rank} ({'running' if rank in waiting else 'finished'}) ---\n{stack}")
        super().__init__("\n".join(parts) + said)


def how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    return f"killed by {signal.Signals(-exitcode).name}"


def rank_errors(trouble: dict[int, Raised | Died]) -> list[RankError]:
    """The first to fail comes first. Deaths precede exceptions: peers of a dead rank raise because it died."""
    errors = []
    for rank, reply in sorted(trouble.items(), key=lambda item: getattr(item[1], "at_s", 0.0)):
        if isinstance(reply, Died):
            ended = how_it_ended(reply.exitcode)
            errors.append(RankError(rank, "Died", ended, f"the process ended before it answered: {ended}\n"))
        else:
            errors.append(RankError(rank, reply.type_name, reply.message, reply.traceback))
    return errors
