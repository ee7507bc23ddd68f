"""Runs whose ranks are killed, or that are told to stop, at any step end where an undisturbed one does, bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.harness import start_ranks
from tests.train.disturbed import (
    GOING_ON,
    SETTINGS,
    STEPS,
    last_commit,
    listening_rank,
    same_so_far,
    undisturbed_curve,
)
from tests.train.launched import Launch, curve, launched
from tests.train.pooled import config_file, settings_of, trained

AGAIN = 1  # times that the ranks of a launch start again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    return undisturbed_curve(tmp_path_factory.mktemp("undisturbed") / "run")


def further(out: Path, chance: random.Random) -> int:
    """A step after the last that is written down, which after a kill is after the last that was saved."""
    return len(curve(out)) + chance.randrange(1, 8)


def end_as(out: Path, whole: dict) -> None:
    trained(2, out, **GOING_ON)
    assert curve(out) == whole


# -- ranks that are killed ---------------------------------------------------------------------------------------------


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
    saved = last_commit(out)
    assert f"rank {struck} was killed by SIGKILL" in line and ("onefold train --resume --out" in line) == (saved > 0)
    assert saved % 5 == 0, "a step that was not due was saved"


def kill_bare(out: Path, whole: dict, at: int, rank: int) -> None:
    with start_ranks(2, listening_rank, settings_of(out, **GOING_ON), timeout_s=120) as group:
        while group.message(0) < at:
            pass
        group.kill(rank)
        outcomes = group.join()
    assert outcomes[rank].exitcode == -signal.SIGKILL
    assert "CommError" in outcomes[1 - rank].error
    same_so_far(out, whole)


def fresh(launch: Launch, before: set[int]) -> dict[int, int] | None:
    """The ranks, once there are two that were not there before."""
    ranks = {rank: pid for rank, pid in launch.rank_pids().items() if pid not in before}
    return ranks if len(ranks) == 2 else None


# -- runs that are told to stop ----------------------------------------------------------------------------------------


def interrupt_launch(out: Path, at: int, chance: random.Random, number: int) -> None:
    """By a signal to the launcher, or to a rank."""
    with launched(out, "--config", str(config_file(out, **SETTINGS)), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= at, f"step {at}")
        os.kill(chance.choice([launch.process.pid, *launch.rank_pids().values()]), number)
        code, _, err = launch.end()
        assert code == 0, err
        assert "stopped and saved" in err
        assert launch.gone()


def interrupt_twice(out: Path, whole: dict, at: int) -> None:
    """A launch that goes on: a second signal ends it at once, while the last step is still to be saved (for ever)."""
    with launched(out, "--ranks", "2", "--resume") as launch:
        launch.wait_for(lambda: launch.steps() >= at, f"step {at}")
        os.kill(launch.rank_pids()[1], signal.SIGSTOP)  # so that nobody comes to the end of the step
        launch.process.terminate()
        first_s = time.monotonic()
        launch.wait_for(lambda: time.monotonic() > first_s + 1.5)  # what comes together is one signal
        launch.process.terminate()
        code, _, err = launch.end()
        assert code == 128 + signal.SIGTERM, err
        assert launch.gone()
    same_so_far(out, whole)


def interrupt_bare(out: Path, whole: dict, at: int, chance: random.Random) -> None:
    with start_ranks(2, listening_rank, settings_of(out, **GOING_ON), timeout_s=120) as group:
        while group.message(0) < at:
            pass
        group.kill(chance.randrange(2), chance.choice([signal.SIGTERM, signal.SIGINT]))
        outcomes = group.join()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes
    assert not outcomes[0].value.finished
    saved_in_hand(out, whole, at)


def saved_in_hand(out: Path, whole: dict, at: int) -> None:
    assert at <= same_so_far(out, whole) == last_commit(out) < STEPS, "the step in hand was not saved"


# ----------------------------------------------------------------------------------------------------------------------


def test_a_run_disturbed_at_random_steps_loses_nothing_and_a_second_signal_ends_it_at_once(tmp_path, undisturbed):
    """Ranks are killed twice in a launch, which starts them again once; the next launch is told to stop twice; ranks
    without a launcher are told to stop."""
    out, chance = tmp_path / "run", random.Random(7)
    kill_launched(out, undisturbed, AGAIN + 1, chance)
    interrupt_twice(out, undisturbed, further(out, chance))
    interrupt_bare(out, undisturbed, further(out, chance), chance)
    end_as(out, undisturbed)


@pytest.mark.trials_of("kills")
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_ranks_killed_at_random_steps_change_nothing_a_hundred_times(tmp_path, undisturbed, seed, soak):
    out, chance = tmp_path / "run", random.Random(100 + seed)
    kill_launched(out, undisturbed, AGAIN + 1, chance)
    for _ in range(3):
        kill_bare(out, undisturbed, further(out, chance), chance.randrange(2))
    end_as(out, undisturbed)
    soak.tried(AGAIN + 1 + 3)


@pytest.mark.trials_of("signals")
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_runs_interrupted_at_random_steps_lose_nothing_a_hundred_times(tmp_path, undisturbed, seed, soak):
    out, chance = tmp_path / "run", random.Random(100 + seed)
    at = further(out, chance)
    interrupt_launch(out, at, chance, chance.choice([signal.SIGTERM, signal.SIGINT]))
    saved_in_hand(out, undisturbed, at)
    interrupt_twice(out, undisturbed, further(out, chance))
    for _ in range(3):
        interrupt_bare(out, undisturbed, further(out, chance), chance)
    end_as(out, undisturbed)
    soak.tried(1 + 1 + 3)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    out = tmp_path / "run"
    config = config_file(out, **SETTINGS)
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= 5)
        assert len(launch.pids()) == 3  # launcher, two ranks
        launch.process.kill()
        assert launch.gone()
