"""The watcher: every survivor names the rank that died, stopped, raised, left or is late, and ends in time.

Messages are real and asynchronous, over gloo. What never completes is a receive between two survivors that nobody
answers: gloo itself would end a message to a process that is gone.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold import CommError
from onefold.comm.meter import Label
from onefold.comm.watcher import Watcher
from onefold.comm.watching import current_watcher, start_watcher
from tests.faults.test_harness_faults import is_gone
from tests.harness import fresh_ranks, start_ranks, tell
from tests.harness.python import start_python
from tests.parity.test_examples import free_port

RANKS = 3
EVERYONE = (0, 1, 2)
TIMEOUT_S = 3.0
ENDS_WITHIN_S = TIMEOUT_S + 2 + 2  # the promise, and what a machine that is busy with other work adds
TOLD = ("raises", "exits", "left")  # what a rank says itself, which peers hear long before a time limit
LONG_TIMEOUT_S, TOLD_WITHIN_S = 20.0, 3.0
COMPLETED = 4  # messages before the fault


class Seen(NamedTuple):
    """What a survivor's main thread got."""

    message: str
    again: str  # from a second check()
    seconds: float  # since the fault


def gather(watcher: Watcher, unit: str, work: dist.Work | None, timeout_s: float = TIMEOUT_S) -> None:
    assert work is not None
    watcher.issued("gather", EVERYONE, Label("gather-forward", unit), work.is_completed, timeout_s)


def wait_for_ever() -> None:
    threading.Event().wait()


def wait_for_the_finding(watcher: Watcher, words_of_stuck: Path) -> None:
    """Raises what the watcher found, once the stuck rank has ended too: gloo would end its message at our end."""
    started_s = time.monotonic()
    while True:
        try:
            watcher.check()
        except CommError as error:
            with pytest.raises(CommError) as again:
                watcher.check()
            tell(Seen(str(error), str(again.value), time.monotonic() - started_s))
            while (
                "onefold: rank" not in words_of_stuck.read_text() and time.monotonic() - started_s < 3 * ENDS_WITHIN_S
            ):
                time.sleep(0.01)
            raise
        time.sleep(0.01)


def end_as_a_script(error: BaseException, code: int) -> None:
    """What the interpreter does after an exception, which the harness catches."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code)


def raises() -> None:
    try:
        raise TypeError("a bad batch\nof many lines")
    except TypeError as error:
        end_as_a_script(error, 1)


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": raises,
    "exits": lambda: end_as_a_script(SystemExit(3), 3),
    "late": lambda: None,
    "nothing": lambda: None,
    "left": onefold.shutdown,
}


def take_part(fault: str, lost: int, errors: str) -> None:
    """Rank `lost` has a fault; of the survivors one calls check(), and one is stuck in a message."""
    onefold.init()
    watcher = start_watcher()
    timeout_s = LONG_TIMEOUT_S if fault in TOLD else TIMEOUT_S
    watcher.on_abort(lambda: Path(errors, f"aborted{rank}").touch())
    rank = dist.get_rank()
    checks, stuck = (peer for peer in EVERYONE if peer != lost)
    os.dup2(os.open(f"{errors}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    for unit in range(COMPLETED):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        gather(watcher, f"blocks.{unit}", work, timeout_s)
        work.wait()
    dist.barrier()
    tell("at it")
    if rank == lost:
        FAULTS[fault]()
        if fault == "left":
            return
    if rank != lost or fault == "nothing":
        never = dist.irecv(torch.ones(1), checks if rank == stuck else stuck, tag=99)
        gather(watcher, f"blocks.{COMPLETED}", never, timeout_s)
    if rank == stuck:
        never.wait()
    wait_for_the_finding(watcher, Path(errors, str(stuck)))


def environment(store: str, folder: Path) -> dict[str, str]:
    """What makes ranks meet in this kind of store."""
    served_by_rank0 = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": free_port()}
    return {"file": {"ONEFOLD_STORE": str(folder / "store")}, "rank 0": served_by_rank0, "agent": {}}[store]


LATE = f"has not come to message {COMPLETED + 1} on the link gather, gather-forward of blocks.{COMPLETED} (the last "
CASES = [
    ("killed", 1, "file", "rank 1 has ended or is stopped"),
    ("killed", 0, "rank 0", "rank 0 has ended or is stopped"),
    ("stopped", 2, "agent", "rank 2 has ended or is stopped"),
    ("stopped", 0, "rank 0", "rank 0 has ended or is stopped"),
    ("raises", 0, "file", "rank 0 has ended by TypeError: a bad batch; "),
    ("exits", 1, "agent", "rank 1 has ended (exit)"),
    ("late", 2, "agent", f"rank 2 {LATE}there was gather-forward of blocks.3, message 4)"),
    ("nothing", 1, "file", "all of its ranks (ranks 0, 1, 2) have come to it: the network hangs"),
    ("left", 2, "agent", "rank 2 has called shutdown()"),
]


@pytest.mark.parametrize("fault, lost, store, named", CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_every_survivor_names_the_rank_and_ends_in_time(
    fault: str, lost: int, store: str, named: str, tmp_path: Path
) -> None:
    env = environment(store, tmp_path)
    checks, stuck = (peer for peer in EVERYONE if peer != lost)
    with start_ranks(RANKS, take_part, fault, lost, str(tmp_path), timeout_s=60, env=env, init=False) as group:
        for rank in EVERYONE:
            assert group.message(rank) == "at it"
        began_s = time.monotonic()
        seen = group.message(checks)
        with pytest.raises(Exception, match=f"rank {stuck}"):
            group.message(stuck)  # ends without a word to the test
        took_s = time.monotonic() - began_s
        group.kill(lost)
        outcomes = group.join()
    assert took_s < ENDS_WITHIN_S
    assert seen.message == seen.again
    assert seen.message.startswith(f"rank {checks}: ") and named in seen.message, seen
    last_words = (tmp_path / str(stuck)).read_text()
    assert f"onefold: rank {stuck}: " in last_words and named in last_words
    if store != "rank 0":  # through it all ranks agree on one finding
        assert seen.message.removeprefix(f"rank {checks}: ") in last_words
    assert [outcomes[rank].exitcode for rank in (checks, stuck)] == [1, 1]
    assert all((tmp_path / f"aborted{rank}").exists() for rank in (checks, stuck))
    assert all(is_gone(pid) for pid in group.pids)
    if fault in TOLD:
        assert seen.seconds < TOLD_WITHIN_S


def lose_a_connection(fault: str, lost: int) -> None:
    """Rank `lost` has a fault; the backend of the first survivor says that a connection broke, the other only looks."""
    onefold.init()
    watcher = start_watcher()
    rank = dist.get_rank()
    first = min(peer for peer in EVERYONE if peer != lost)
    dist.barrier()
    tell("at it")
    if rank == lost:
        FAULTS[fault]()
    try:
        if rank == first:
            watcher.explain_broken(EVERYONE, Label("gather-forward", "blocks.1"), RuntimeError("closed by a peer\n..."))
        while True:
            watcher.check()
            time.sleep(0.01)
    except CommError as error:
        tell(str(error))
        raise


@pytest.mark.parametrize(
    "fault, lost, store, named",
    [
        ("killed", 1, "file", "rank 1 has ended or is stopped, nothing is heard from there; look at rank 1's output"),
        ("killed", 0, "rank 0", "rank 0 has ended or is stopped: the store that it serves does not answer"),
        ("exits", 2, "agent", "rank 2 has ended (exit); look at rank 2's output"),
        ("late", 1, "agent", "and all of its ranks (ranks 0, 1, 2) are there: look at the network between them"),
    ],
)
def test_a_broken_connection_of_which_the_backend_names_no_end(
    fault: str, lost: int, store: str, named: str, tmp_path: Path
) -> None:
    survivors = [rank for rank in EVERYONE if rank != lost]
    told_by = survivors[:1] if store == "rank 0" else survivors  # the other has no store to hear it from
    env = environment(store, tmp_path)
    with start_ranks(RANKS, lose_a_connection, fault, lost, timeout_s=60, env=env, init=False) as group:
        for rank in EVERYONE:
            assert group.message(rank) == "at it"
        began_s = time.monotonic()
        said = {rank: group.message(rank) for rank in told_by}
        took_s = time.monotonic() - began_s
        for rank in EVERYONE:
            group.kill(rank)
        group.join()
    assert took_s < ENDS_WITHIN_S
    for rank, words in said.items():
        assert words.startswith(f"rank {rank}: ") and named in words
        assert "gather-forward of blocks.1 has failed: closed by a peer" in words and "..." not in words


SCRIPT = """
import sys, threading, torch, torch.distributed as dist, onefold
from onefold.comm.meter import Label
from onefold.comm.watching import start_watcher
onefold.init()
watcher = start_watcher()
work = dist.all_reduce(torch.ones(1), async_op=True)
watcher.issued("gather", (0, 1), Label("gather-forward", "a"), work.is_completed, 60.0)
work.wait()
if dist.get_rank() == 1:
    {fault}
watcher.issued("gather", (0, 1), Label("gather-forward", "b"), lambda: False, 60.0)
while True:
    watcher.check()
    threading.Event().wait(0.02)
"""


@pytest.mark.parametrize(
    "fault, code, named",
    [
        ("raise ValueError('no such file')", 1, "rank 1 has ended by ValueError: no such file"),
        pytest.param("sys.exit(7)", 7, "rank 1 has ended (exit)", marks=pytest.mark.soak),
    ],
    ids=["raises", "exits"],
)
def test_the_end_of_a_real_interpreter_is_told_to_its_peers(fault: str, code: int, named: str, tmp_path: Path) -> None:
    env = os.environ | {"ONEFOLD_STORE": str(tmp_path / "store"), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    script = SCRIPT.format(fault=fault)
    ranks = [
        start_python("-c", script, env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=50)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, code]
    assert f"CommError: rank 0: {named}" in said[0]


def issue_many() -> tuple[float, float, int]:
    """Growth in bytes, microseconds a call, and messages that are kept."""
    onefold.init()
    watcher = start_watcher()
    label, finished = Label("gather-forward", "a"), threading.Event()

    def calls(count: int) -> None:
        for _ in range(count):
            watcher.issued("gather", EVERYONE, label, finished.is_set, TIMEOUT_S)
            watcher.check()

    finished.set()
    calls(10_000)
    tracemalloc.start()
    calls(1_000)
    before, _ = tracemalloc.get_traced_memory()
    calls(10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    started_s = time.process_time()
    calls(100_000)
    taken_s = time.process_time() - started_s
    kept = watcher.unfinished
    onefold.shutdown()
    assert current_watcher() is None
    return after - before, taken_s / 100_000 * 1e6, kept


def test_a_hundred_thousand_messages_leave_nothing_behind() -> None:
    for growth, microseconds, kept in (outcome.value for outcome in fresh_ranks(1, issue_many, init=False)):
        assert growth < 100_000
        assert kept == 0
        assert microseconds < 50  # about 2; the bound is for a busy machine


def meet_again() -> list[float]:
    sums = []
    for _ in range(3):
        onefold.init()
        watcher = start_watcher()
        total = torch.ones(1)
        work = dist.all_reduce(total, async_op=True)
        gather(watcher, "a", work)
        sums.append(total.item() if work.wait() else 0.0)
        onefold.shutdown()
        onefold.shutdown()
        assert not dist.is_initialized() and watcher.unfinished == 0
    return sums


@pytest.mark.parametrize("store", ["file", "agent", "rank 0"])
def test_init_works_again_after_shutdown(store: str, tmp_path: Path) -> None:
    env = environment(store, tmp_path)
    outcomes = fresh_ranks(RANKS, meet_again, env=env, init=False, timeout_s=60)
    assert [(outcome.exitcode, outcome.value) for outcome in outcomes] == [(0, [3.0] * 3)] * RANKS
