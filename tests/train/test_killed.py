"""Ranks killed at any step: the run ends where an undisturbed one does, bit for bit."""

import os
import random
import signal
from pathlib import Path

import pytest

from tests.harness import start_ranks
from tests.train.disturbed import (
    GOING_ON,
    SETTINGS,
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


def test_ranks_killed_at_random_steps_change_nothing(tmp_path, undisturbed):
    """Twice in a launch, which starts them again once, and once without."""
    kill_ranks(tmp_path / "run", undisturbed, times=3, seed=7)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_ranks_killed_at_random_steps_change_nothing_a_hundred_times(tmp_path, undisturbed, seed):
    kill_ranks(tmp_path / "run", undisturbed, times=5, seed=100 + seed)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    out = tmp_path / "run"
    config = config_file(out, **SETTINGS)
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        launch.wait_for(lambda: launch.steps() >= 5)
        assert len(launch.pids()) == 3  # launcher, two ranks
        launch.process.kill()
        assert launch.gone()
