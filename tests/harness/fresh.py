"""Ranks that live for one call, so that a test may kill them, or give them an environment of their own."""

import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.harness.failures import RankFailure, how_it_ended, rank_errors
from tests.harness.packed_calls import Died, Raised, Returned, Told, name_of, pack_call
from tests.harness.processes import RankProcesses


class Outcome(NamedTuple):
    """How one rank ended. `exitcode` is minus the signal for a killed rank, as in subprocess."""

    rank: int
    exitcode: int
    value: Any
    error: str | None  # the traceback
    seconds: float


class RankGroup:
    """Running ranks, in the hands of a test."""

    def __init__(self, processes: RankProcesses, name: str, timeout_s: float) -> None:
        self._processes = processes
        self._name = name
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._running = set(range(len(processes.pids)))
        self._told: list[deque[Any]] = [deque() for _ in processes.pids]
        self._replies: dict[int, Returned | Raised] = {}
        self._outcomes: dict[int, Outcome] = {}

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self._processes.kill([rank], signum)

    def message(self, rank: int) -> Any:
        """The next object that the rank gave to `tell`; waits for it."""
        while not self._told[rank]:
            if rank in self._outcomes:
                ended = self._replies.get(rank)
                if not isinstance(ended, Raised):
                    ended = Died(self._outcomes[rank].exitcode)
                raise RankFailure(f"{self._name}, waiting for a message", rank_errors({rank: ended}), {})
            self._step()
        return self._told[rank].popleft()

    def join(self) -> list[Outcome]:
        """Wait until every rank's process has ended."""
        while self._running:
            self._step()
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def _step(self) -> None:
        event = self._processes.next_event(self._running, self._started_s + self._timeout_s)
        if event is None:
            raise self._processes.hang(self._name, self._timeout_s, sorted(self._running))
        if isinstance(event.message, Told):
            self._told[event.rank].append(pickle.loads(event.message.payload))
        elif isinstance(event.message, Died):
            self._running.discard(event.rank)
            self._outcomes[event.rank] = self._outcome(event.rank, event.message.exitcode)
        else:
            self._replies[event.rank] = event.message

    def _outcome(self, rank: int, exitcode: int) -> Outcome:
        reply = self._replies.get(rank)
        if isinstance(reply, Returned):
            return Outcome(rank, exitcode, pickle.loads(reply.payload), None, reply.seconds)
        if isinstance(reply, Raised):
            return Outcome(rank, exitcode, None, reply.traceback, reply.seconds)
        error = None if exitcode == 0 else f"the process ended before it answered: {how_it_ended(exitcode)}\n"
        return Outcome(rank, exitcode, None, error, time.monotonic() - self._started_s)


@contextmanager
def start_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    init: bool = True,
    **kwargs: Any,
) -> Iterator[RankGroup]:
    """Start `fn(*args, **kwargs)` on `n` new processes; whatever still runs when the block ends is killed.

    with start_ranks(2, train) as group:
        assert group.message(1) == "step 3"
        group.kill(1)
        survivor, killed = group.join()

    With `init=False` no process group is made, but the environment is torchrun's, so `env://` works.
    """
    call = pack_call(fn, args, kwargs)
    processes = RankProcesses(n, init=init, once=True, env=env)
    try:
        group = RankGroup(processes, name_of(fn), timeout_s)
        for rank in range(n):
            processes.send(rank, call)
        yield group
    finally:
        processes.end()


def fresh_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    init: bool = True,
    **kwargs: Any,
) -> list[Outcome]:
    """Run `fn(*args, **kwargs)` on `n` new processes until all have ended; return how each did.

    assert [outcome.exitcode for outcome in fresh_ranks(2, os.getpid)] == [0, 0]
    """
    with start_ranks(n, fn, *args, timeout_s=timeout_s, env=env, init=init, **kwargs) as group:
        return group.join()
