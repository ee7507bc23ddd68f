"""When ranks raise, hang or die: the test hears of it soon, with the reason, and no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, RankHang, fresh_ranks, run_ranks, run_ranks_raises, start_ranks, tell
from tests.harness.failures import rank_errors
from tests.harness.packed_calls import Died, Raised
from tests.harness.python import start_python

ROOT = Path(__file__).parents[2]


def is_gone(pid: int, timeout_s: float = 0.0) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(wait([handle], timeout_s))
    finally:
        os.close(handle)


def fail_on(rank, error):
    if dist.get_rank() == rank:
        raise error
    dist.barrier()


def test_a_failing_rank_is_reported_with_its_traceback_and_where_its_peers_wait():
    pids = run_ranks(3, os.getpid)
    started_s = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, fail_on, 1, KeyError("lost"))
    assert time.monotonic() - started_s < 30  # long before the limit of 60 s
    (error,) = caught.value.errors
    assert (error.rank, error.type_name, error.message) == (1, "KeyError", "'lost'")
    assert "fail_on" in error.traceback and "raise error" in error.traceback
    assert error.traceback in str(caught.value)
    assert sorted(caught.value.stuck) == [0, 2]
    assert all("barrier" in stack for stack in caught.value.stuck.values())
    assert all(is_gone(pid) for pid in pids)
    assert set(run_ranks(3, os.getpid)).isdisjoint(pids)


def test_the_first_rank_to_fail_is_reported_first_and_a_death_before_all():
    late, early = (Raised("ValueError", "no", "...", at_s=at_s, seconds=0.0) for at_s in (2.0, 1.0))
    assert [error.rank for error in rank_errors({0: late, 1: early, 2: Died(-9)})] == [2, 1, 0]


def refuse():
    raise ValueError("no")


def test_when_every_rank_fails_every_traceback_is_shown():
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, refuse, timeout_s=1)
    assert sorted(error.rank for error in caught.value.errors) == [0, 1] and caught.value.stuck == {}
    assert str(caught.value).count("in refuse") == 2


def unpicklable():
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure():
    with pytest.raises(RankFailure, match="cannot pickle"):
        run_ranks(2, unpicklable)


def stay_away():
    threading.Event().wait()


def all_but_rank_1_reduce():
    if dist.get_rank() == 1:
        stay_away()
    dist.all_reduce(torch.ones(1))


def test_a_hang_is_ended_and_every_ranks_stack_is_reported():
    pids = run_ranks(3, os.getpid)
    with pytest.raises(RankHang, match=r"ranks \[0, 1, 2\] had not finished after 2 s") as caught:
        run_ranks(3, all_but_rank_1_reduce, timeout_s=2)
    stacks = caught.value.stacks
    assert "in stay_away" in stacks[1]
    assert all("in all_reduce" in stacks[rank] and "in stay_away" not in stacks[rank] for rank in (0, 2))
    assert all(stack in str(caught.value) for stack in stacks.values())
    assert all(is_gone(pid) for pid in pids)
    assert run_ranks(3, dist.get_rank) == [0, 1, 2]


def one_raises_one_hangs():
    if dist.get_rank() == 0:
        raise ValueError("seen by rank 0")
    stay_away()


def test_a_hang_where_all_should_raise_shows_who_raised_and_who_hangs():
    with pytest.raises(RankHang, match="seen by rank 0") as caught:
        run_ranks_raises(2, one_raises_one_hangs, timeout_s=2)
    assert caught.value.waiting == [1] and "in stay_away" in caught.value.stacks[1]


def break_cleaning_on_rank_0_then_refuse():
    if dist.get_rank() == 0:
        dist.destroy_process_group = stay_away
    raise ValueError("no")


def test_a_pool_that_cannot_be_cleaned_is_replaced_not_handed_on(monkeypatch):
    monkeypatch.setattr("tests.harness.pool.RESET_TIMEOUT_S", 1.0)
    pids = run_ranks(2, os.getpid)
    run_ranks_raises(2, break_cleaning_on_rank_0_then_refuse)
    assert set(run_ranks(2, os.getpid)).isdisjoint(pids)
    assert all(is_gone(pid) for pid in pids)


def kill_myself_on(rank, signum):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signum)
    dist.barrier()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_is_reported_first_with_its_signal(signum):
    with pytest.raises(RankFailure, match=f"rank 1 failed first: Died: killed by {signum.name}") as caught:
        run_ranks(2, kill_myself_on, 1, signum)
    assert caught.value.errors[0].rank == 1
    assert run_ranks(2, dist.get_rank) == [0, 1]


def report_process(name):
    return os.getpid(), os.environ.get(name), dist.is_initialized()


def test_fresh_ranks_are_new_processes_with_the_environment_they_were_given():
    outcomes = fresh_ranks(2, report_process, "COLOUR", env={"COLOUR": "blue"})
    again = fresh_ranks(2, report_process, "COLOUR", init=False)
    pids = {outcome.value[0] for outcome in outcomes + again}
    assert len(pids) == 4 and pids.isdisjoint(run_ranks(2, os.getpid))
    assert [outcome.value[1:] for outcome in outcomes] == [("blue", True)] * 2
    assert [outcome.value[1:] for outcome in again] == [(None, False)] * 2
    assert [(outcome.rank, outcome.exitcode, outcome.error) for outcome in outcomes] == [(0, 0, None), (1, 0, None)]
    assert all(is_gone(pid) for pid in pids)


def meet_through_the_environment():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_fresh_ranks_without_a_group_can_make_one_from_the_environment():
    assert [outcome.value for outcome in fresh_ranks(3, meet_through_the_environment, init=False)] == [3.0] * 3


def end_in_four_ways():
    rank = dist.get_rank()
    if rank == 0:
        raise ValueError("one way")
    if rank == 1:
        sys.exit(3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def test_outcomes_tell_an_exception_an_exit_a_signal_and_a_value_apart():
    raised, left, killed, returned = fresh_ranks(4, end_in_four_ways)
    assert raised.exitcode == 1 and "ValueError: one way" in raised.error and "end_in_four_ways" in raised.error
    assert left.exitcode == 3
    assert killed.exitcode == -signal.SIGKILL and "SIGKILL" in killed.error
    assert (returned.exitcode, returned.value, returned.error) == (0, "done", None)


def tell_then_reduce():
    tell(("ready", dist.get_rank()))
    if dist.get_rank() == 1:
        stay_away()
    dist.all_reduce(torch.ones(1))


def test_a_test_hears_a_rank_kills_it_and_sees_its_peer_fail():
    with start_ranks(2, tell_then_reduce) as group:
        assert [group.message(rank) for rank in range(2)] == [("ready", 0), ("ready", 1)]
        assert not is_gone(group.pids[1])
        group.kill(1)
        survivor, killed = group.join()
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.exitcode == 1 and "all_reduce" in survivor.error


def test_waiting_for_a_message_from_a_rank_that_failed_raises_its_error():
    with start_ranks(2, fail_on, 0, ValueError("silent")) as group, pytest.raises(RankFailure, match="silent"):
        group.message(0)


def test_ranks_that_still_run_when_the_test_fails_are_ended():
    with pytest.raises(ZeroDivisionError), start_ranks(2, tell_then_reduce) as group:
        group.message(0)
        raise ZeroDivisionError
    assert all(is_gone(pid) for pid in group.pids)


def test_fresh_ranks_that_hang_are_ended_with_every_stack():
    with pytest.raises(RankHang) as caught:
        fresh_ranks(2, all_but_rank_1_reduce, timeout_s=3)
    assert "in all_reduce" in caught.value.stacks[0] and "in stay_away" in caught.value.stacks[1]


def test_tell_outside_a_fresh_rank_is_refused():
    assert run_ranks_raises(1, tell, "hello")[0].message.startswith("tell() was called outside a fresh rank")


PARENT = """
from tests.harness import run_ranks, start_ranks
from tests.faults.test_harness_faults import tell_then_reduce
import os, threading
pids = run_ranks(2, os.getpid)
with start_ranks(2, tell_then_reduce) as group:
    group.message(0), group.message(1)
    print(*pids, *group.pids, flush=True)
    threading.Event().wait()
"""


def test_ranks_die_with_the_process_that_started_them():
    with start_python("-c", PARENT, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 4 and not any(is_gone(pid) for pid in pids)
        finally:
            parent.kill()
    assert all(is_gone(pid, timeout_s=10) for pid in pids)


SESSION = """
import os
import pytest
import torch
from pathlib import Path
from tests.harness import run_ranks

def test_pool():
    Path(__file__).with_name("pids").write_text(" ".join(map(str, run_ranks(2, os.getpid))))

@pytest.mark.soak
@pytest.mark.trials_of("bit flips")
def test_soak(soak):
    soak.tried(soak.number(2, 20))

@pytest.mark.trials_of("bit flips")
def test_lost(soak):
    soak.tried()
    raise ValueError("a trial went wrong")

@pytest.mark.gpu
def test_gpu():
    torch.zeros(1, device="cuda")
"""


@pytest.mark.parametrize(
    ("flags", "summary"),
    [
        pytest.param(["-k", "not lost"], "1 passed, 1 skipped, 2 deselected", marks=pytest.mark.soak),
        (["--soak", "-k", "not pool"], "1 failed, 1 passed, 1 skipped, 1 deselected"),
    ],
)
def test_a_session_ends_without_ranks_or_warnings_honours_the_marks_and_records_trials(tmp_path, flags, summary):
    (tmp_path / "test_session.py").write_text(SESSION)
    python = [sys.executable, "-W", "error::ResourceWarning"]
    command = [*python, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", *flags, str(tmp_path)]
    command += ["--soak-record", str(tmp_path / "record")]
    no_device = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=no_device, capture_output=True, text=True, timeout=300)
    assert summary in done.stdout and "warning" not in done.stdout.lower(), done.stdout
    assert done.stderr == ""
    if "--soak" not in flags:
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2 and all(is_gone(int(pid)) for pid in pids)
        assert not (tmp_path / "record").exists()
    else:
        rows = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        assert [(row["kind"], row["trials"], row["outcome"]) for row in rows] == [
            ("bit flips", 20, "passed"), ("bit flips", 1, "failed"),
        ]  # fmt: skip
