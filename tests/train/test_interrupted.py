"""Ranks killed and runs interrupted, at any step: the run ends where an undisturbed one does, bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.storage import Storage
from onefold.train.run.metrics import Listener, Row
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended, train
from onefold.train.run.stop import Stop
from tests.harness import start_ranks, tell
from tests.train.launched import Launch, curve, launched, run
from tests.train.pooled import config_file, settings_of, trained

STEPS = 100
SETTINGS = {
    "steps": {"steps": STEPS, "eval_every": 25},
    "checkpoints": {"save_every": 5, "max_restarts": 0},
}
GOING_ON = {**SETTINGS, "checkpoints": {"save_every": 5, "resume": True}}
AGAIN = 1  # times that the ranks of a launch start again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """The curve of a run that nobody interrupts."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(2, out, **SETTINGS)
    assert len(curve(out)) == STEPS
    return curve(out)


def same_so_far(out: Path, whole: dict) -> int:
    """Every step that is written down is as in the undisturbed run; the last one."""
    found = curve(out)
    assert list(found) == list(range(1, len(found) + 1)), "a step is missing"
    assert all(found[step] == whole[step] for step in found)
    return len(found)


def last_commit(out: Path) -> int:
    folder = out / "checkpoints"
    return max(committed(Storage(), folder), default=0) if folder.exists() else 0


def kill_ranks(out: Path, whole: dict, times: int, seed: int) -> None:
    """Kill a random rank at a random step, again and again; a launch is slow to start, so most are bare ranks."""
    chance = random.Random(seed)
    kill_launched(out, whole, AGAIN + 1, chance)
    for _ in range(times - AGAIN - 1):
        kill_bare(out, last_commit(out) + chance.randrange(1, 8), chance.randrange(2))
        same_so_far(out, whole)
    trained(2, out, **GOING_ON)
    assert curve(out) == whole


def kill_launched(out: Path, whole: dict, times: int, chance: random.Random) -> None:
    """All ranks start again by themselves, as often as they may; the next time they end at once, without saving."""
    config = config_file(out, **{**SETTINGS, "checkpoints": {"save_every": 5, "max_restarts": times - 1}})
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        before: set[int] = set()
        for _ in range(times):
            ranks = launch.wait_for(lambda seen=before: fresh(launch, seen), "two new ranks")
            at = launch.steps() + chance.randrange(1, 8)  # beyond what the last start has left
            launch.wait_for(lambda at=at: launch.steps() >= at, f"step {at}")
            struck = chance.randrange(2)
            os.kill(ranks[struck], signal.SIGKILL)
            before |= set(ranks.values())
            same_so_far(out, whole)
        code, _, err = launch.end()
        assert launch.gone()
    *again, line = err.splitlines()
    assert code == 1 and [("a rank was lost" in text) for text in again] == [True] * (times - 1), err
    assert f"rank {struck} was killed by SIGKILL" in line and "onefold train --resume --out" in line
    assert last_commit(out) % 5 == 0, "a step that was not due was saved"


def kill_bare(out: Path, at: int, rank: int) -> None:
    with start_ranks(2, listening_rank, settings_of(out, **GOING_ON), timeout_s=120) as group:
        while group.message(0) < at:
            pass
        group.kill(rank)
        outcomes = group.join()
    assert outcomes[rank].exitcode == -signal.SIGKILL
    assert "CommError" in outcomes[1 - rank].error


def fresh(launch: Launch, before: set[int]) -> dict[int, int] | None:
    """The ranks, once there are two that were not there before."""
    ranks = {rank: pid for rank, pid in launch.rank_pids().items() if pid not in before}
    return ranks if len(ranks) == 2 else None


def interrupt(out: Path, whole: dict, times: int, seed: int) -> None:
    """A chain of runs, each ended by a signal and gone on with; the first and the last are launches."""
    chance = random.Random(seed)
    for number in range(times):
        at = last_commit(out) + chance.randrange(1, 8)
        number_sent = chance.choice([signal.SIGTERM, signal.SIGINT])
        if number == 0:
            interrupt_launch(out, at, chance, number_sent)
        else:
            interrupt_bare(out, at, chance.randrange(2), number_sent)
        assert at <= same_so_far(out, whole) == last_commit(out) < STEPS, "the step in hand was not saved"
    code, _, err = run(out, "--ranks", "2", "--resume")
    assert code == 0, err
    assert curve(out) == whole


def interrupt_launch(out: Path, at: int, chance: random.Random, number: int) -> None:
    """By a signal to the launcher, or to a rank."""
    with launched(out, "--config", str(config_file(out, **SETTINGS)), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= at, f"step {at}")
        os.kill(chance.choice([launch.process.pid, *launch.rank_pids().values()]), number)
        code, _, err = launch.end()
        assert code == 0, err
        assert "stopped and saved" in err
        assert launch.gone()


def interrupt_bare(out: Path, at: int, rank: int, number: int) -> None:
    with start_ranks(2, listening_rank, settings_of(out, **GOING_ON), timeout_s=120) as group:
        while group.message(0) < at:
            pass
        group.kill(rank, number)
        outcomes = group.join()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes
    assert not outcomes[0].value.finished


class Teller(Listener):
    def row(self, row: Row) -> None:
        tell(row.step)


def listening_rank(settings: Settings) -> Ended:
    return train(settings, Stop(), Teller())


def test_ranks_killed_at_random_steps_change_nothing_ten_times_of_ten(tmp_path, undisturbed):
    kill_ranks(tmp_path / "run", undisturbed, times=10, seed=7)


def test_runs_interrupted_at_random_steps_lose_nothing_ten_times_of_ten(tmp_path, undisturbed):
    interrupt(tmp_path / "run", undisturbed, times=10, seed=7)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_ranks_killed_at_random_steps_change_nothing_a_hundred_times(tmp_path, undisturbed, seed):
    kill_ranks(tmp_path / "run", undisturbed, times=10, seed=100 + seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_runs_interrupted_at_random_steps_lose_nothing_a_hundred_times(tmp_path, undisturbed, seed):
    interrupt(tmp_path / "run", undisturbed, times=10, seed=100 + seed)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    out = tmp_path / "run"
    config = config_file(out, **SETTINGS)
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= 5)
        assert len(launch.pids()) == 3  # launcher, two ranks
        launch.process.kill()
        assert launch.gone()


def test_a_second_signal_ends_at_once(tmp_path):
    """While the last step is still being saved: here, for ever."""
    out = tmp_path / "run"
    config = config_file(out, **SETTINGS)
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= 5)
        os.kill(launch.rank_pids()[1], signal.SIGSTOP)  # so that nobody comes to the end of the step
        launch.process.terminate()
        first_s = time.monotonic()
        launch.wait_for(lambda: time.monotonic() > first_s + 1.5)  # what comes together is one signal
        launch.process.terminate()
        code, _, _ = launch.end()
        assert code == 128 + signal.SIGTERM
        assert launch.gone()
