"""Runs interrupted by a signal at any step: the run ends where an undisturbed one does, bit for bit."""

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
from tests.train.launched import curve, launched
from tests.train.pooled import config_file, settings_of, trained


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    return undisturbed_curve(tmp_path_factory.mktemp("undisturbed") / "run")


def interrupt(out: Path, whole: dict, times: int, seed: int) -> None:
    """A chain of runs, each ended by signals and gone on with; the first two are launches."""
    chance = random.Random(seed)
    for number in range(times):
        at = last_commit(out) + chance.randrange(1, 8)
        number_sent = chance.choice([signal.SIGTERM, signal.SIGINT])
        if number == 1:
            interrupt_twice(out, at)
            same_so_far(out, whole)
            continue
        if number == 0:
            interrupt_launch(out, at, chance, number_sent)
        else:
            interrupt_bare(out, at, chance.randrange(2), number_sent)
        assert at <= same_so_far(out, whole) == last_commit(out) < STEPS, "the step in hand was not saved"
    trained(2, out, **GOING_ON)
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


def interrupt_twice(out: Path, at: int) -> None:
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


def interrupt_bare(out: Path, at: int, rank: int, number: int) -> None:
    with start_ranks(2, listening_rank, settings_of(out, **GOING_ON), timeout_s=120) as group:
        while group.message(0) < at:
            pass
        group.kill(rank, number)
        outcomes = group.join()
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes
    assert not outcomes[0].value.finished


def test_runs_interrupted_at_random_steps_lose_nothing_and_a_second_signal_ends_at_once(tmp_path, undisturbed):
    interrupt(tmp_path / "run", undisturbed, times=3, seed=7)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_runs_interrupted_at_random_steps_lose_nothing_a_hundred_times(tmp_path, undisturbed, seed):
    interrupt(tmp_path / "run", undisturbed, times=5, seed=100 + seed)
