"""Warm ranks, one pool per kind and number, kept for the whole session: a distributed test costs milliseconds.

After a call that made process groups or raised, the pool is reset: its ranks leave every group and meet again,
while the test goes on. A pool that cannot reset, and any pool after a failure, is ended and made anew when needed.
"""

import atexit
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.harness.failures import CaughtError, RankFailure, rank_errors
from tests.harness.packed_calls import Call, Died, Raised, Ready, Reply, Reset, Returned, name_of, pack_call
from tests.harness.processes import RankProcesses
from tests.harness.worlds import GLOO, World

GRACE_S = 2.0  # after a first failure, for the other ranks to say what they saw
START_TIMEOUT_S = 60.0
RESET_TIMEOUT_S = 3.0  # a reset takes milliseconds, unless a message that nobody answers holds a rank: then a new pool


class Pool:
    def __init__(self, world: World, n: int) -> None:
        self.ranks = range(n)
        with ExitStack() as stack:
            around = stack.enter_context(world.opened())
            env = around.environ if around else None
            self.processes = RankProcesses(n, init=True, once=False, env=env, world=world)
            self._stack = stack.pop_all()
        self._generation = 0
        self._unready = set(self.ranks)

    def start(self) -> None:
        trouble = self._wait_ready(START_TIMEOUT_S)
        if trouble:
            stuck = self.processes.end_with_stacks()
            raise RankFailure("starting the pool", rank_errors(trouble), {r: stuck[r] for r in self._unready})
        if self._unready:
            raise self.processes.hang("starting the pool", START_TIMEOUT_S, sorted(self._unready))

    def end(self) -> None:
        self.processes.end()
        self._stack.close()

    def reset(self) -> None:
        """Begin a reset; the next call waits for it."""
        self._generation += 1
        self._unready = set(self.ranks)
        for rank in self.ranks:
            self.processes.send(rank, Reset(self._generation))

    def usable(self) -> bool:
        return not self._wait_ready(RESET_TIMEOUT_S) and not self._unready

    def _wait_ready(self, timeout_s: float) -> dict[int, Raised | Died]:
        deadline_s = time.monotonic() + timeout_s
        while self._unready:
            event = self.processes.next_event(self._unready, deadline_s)
            if event is None:
                break
            self._unready.discard(event.rank)
            if not isinstance(event.message, Ready):
                return {event.rank: event.message}
        return {}

    def call(self, call: Call, timeout_s: float, may_raise: bool) -> dict[int, Reply]:
        """What each rank answered. Ranks that did not answer in time are absent."""
        deadline_s = time.monotonic() + timeout_s
        for rank in self.ranks:
            self.processes.send(rank, call)
        replies: dict[int, Reply] = {}
        while len(replies) < len(self.ranks):
            event = self.processes.next_event([rank for rank in self.ranks if rank not in replies], deadline_s)
            if event is None:
                break
            replies[event.rank] = event.message
            if isinstance(event.message, Died) or (isinstance(event.message, Raised) and not may_raise):
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        return replies


Key = tuple[World, int]
_pools: dict[Key, Pool] = {}


def _take_pool(key: Key) -> Pool:
    pool = _pools.get(key)
    if pool is not None and not pool.usable():
        _drop_pool(key)
        pool = None
    if pool is None:
        pool = Pool(*key)
        _pools[key] = pool
        pool.start()
    return pool


def _drop_pool(key: Key) -> None:
    pool = _pools.pop(key, None)
    if pool is not None:
        pool.end()


@atexit.register  # after pytest's own call this has nothing left to do; elsewhere it keeps exit from waiting for ranks
def shutdown_pools() -> None:
    for key in list(_pools):
        _drop_pool(key)


def _call_pool(key: Key, name: str, call: Call, timeout_s: float, may_raise: bool) -> tuple[Pool, list[Reply]]:
    """Every rank's reply. A death, a hang, and an exception unless they may raise, are a failure of the test."""
    pool = _take_pool(key)
    replies = pool.call(call, timeout_s, may_raise)
    missing = [rank for rank in pool.ranks if rank not in replies]
    trouble = {rank: reply for rank, reply in replies.items() if not isinstance(reply, Returned)}
    errors = rank_errors(trouble)
    if any(isinstance(reply, Died) or not may_raise for reply in trouble.values()):
        stacks = pool.processes.end_with_stacks() if missing else {}
        raise RankFailure(name, errors, {rank: stacks[rank] for rank in missing})
    if missing:
        said = "".join(f"\n--- rank {error.rank} raised ---\n{error.traceback}" for error in errors)
        raise pool.processes.hang(name, timeout_s, missing, said)
    return pool, [replies[rank] for rank in pool.ranks]


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank of a world of `n`; return its value per rank.

    assert run_ranks(2, torch.distributed.get_rank) == [0, 1]
    """
    return run_ranks_over(GLOO, n, pack_call(fn, args, kwargs), name_of(fn), timeout_s)


def run_ranks_over(world: World, n: int, call: Call, name: str, timeout_s: float) -> list[Any]:
    """As `run_ranks`, among ranks of another kind."""
    key = (world, n)
    try:
        pool, replies = _call_pool(key, name, call, timeout_s, may_raise=False)
        values = [pickle.loads(reply.payload) for reply in replies]
    except BaseException:
        _drop_pool(key)
        raise
    if any(reply.left_groups for reply in replies):
        pool.reset()
    return values


def run_ranks_raises(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180, **kwargs: Any
) -> list[CaughtError]:
    """As `run_ranks`, where every rank must raise; return what each raised, and after how long.

    Ranks may raise at different times, up to `timeout_s`: one fails, the others notice.
    """
    key, call = (GLOO, n), pack_call(fn, args, kwargs)
    try:
        pool, replies = _call_pool(key, name_of(fn), call, timeout_s, may_raise=True)
        for rank, reply in enumerate(replies):
            if isinstance(reply, Returned):
                value = pickle.loads(reply.payload)
                raise AssertionError(f"{name_of(fn)}: rank {rank} was expected to raise, but returned {value!r}")
    except BaseException:
        _drop_pool(key)
        raise
    pool.reset()
    return [CaughtError(reply.type_name, reply.message, reply.seconds) for reply in replies]
