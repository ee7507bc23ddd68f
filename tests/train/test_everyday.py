"""Everyday faults of a run: spikes, corrupted replicas, a slow rank, a deadline that cannot be kept."""

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.storage import Storage
from onefold.errors import ConfigError, MismatchError
from onefold.optim.spikes import Spikes
from onefold.train.run import fault_settings
from onefold.train.run.loop import Loop
from onefold.train.run.pace import ROWS, Stragglers, straggler
from onefold.train.run.records import read_metrics, read_warnings
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended
from onefold.train.run.stop import Stop
from tests.harness import run_ranks
from tests.train.disturbed import last_commit
from tests.train.launched import curve, launched
from tests.train.pooled import config_file, one_rank, settings_of

BAD, BATCH = 7, 4  # the step with the bad batch, counted from 1; samples of a step
SLOW_S = 0.3


def on_rank_1(name: str, act: Callable[..., Any]) -> Any:
    """Replaces a method of Loop by act(the method, loop, …), on rank 1 alone."""
    before = getattr(Loop, name)
    odd = torch.distributed.get_rank() == 1
    return patch.object(Loop, name, lambda loop, *args, **kw: (act if odd else called)(before, loop, *args, **kw))


def called(before: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return before(*args, **kw)


def with_spike(settings: Settings) -> Ended:
    """The gradients of one batch are those of a loss a million times as large."""

    steps = count(1)

    def spiked(before: Any, loop: Loop, batches: Any) -> Any:
        if next(steps) != BAD:
            return before(loop, batches)
        backward = loop.optimizer.backward
        with patch.object(loop.optimizer, "backward", lambda loss: backward(loss * 1e6)):
            return before(loop, batches)

    with on_rank_1("_forward_backward", spiked), patch.object(fault_settings, "Spikes", early):
        return one_rank(settings)


def early(**fields: Any) -> Spikes:
    return Spikes(**fields, after=3)


def without_batch(settings: Settings) -> Ended:
    """The data do not have the samples of that step."""
    before = vars(Loop)["_batch"]

    def further(loop: Loop, samples: int, micro: int) -> Any:
        return before(loop, samples + (BATCH if samples >= (BAD - 1) * BATCH else 0), micro)

    with patch.object(Loop, "_batch", further):
        return one_rank(settings)


def test_a_run_that_skips_a_spike_goes_on_as_if_it_never_had_the_batch(tmp_path):
    skipping, without = tmp_path / "skipping", tmp_path / "without"
    run_ranks(
        2, with_spike, settings_of(skipping, faults={"skip_spikes": True, "check_replicas": 1}, zero={"stage": 2})
    )
    run_ranks(2, without_batch, settings_of(without, zero={"stage": 2}))
    ours, theirs = curve(skipping), curve(without)
    assert [row["skipped"] for row in read_metrics(skipping)] == [0] * (BAD - 1) + [1] * (12 - BAD + 1)
    for step in range(1, 12):
        assert ours[step if step < BAD else step + 1][:3] == theirs[step][:3], step
    (warning,) = (row for row in read_warnings(skipping) if row["kind"] == "spike")
    assert warning["message"].startswith(f"step {BAD} was skipped: the gradient norm was ") and warning["rank"] == 0


def corrupted(settings: Settings) -> str:
    """Rank 1's memory errs while it computes step 7."""

    def flip(before: Any, loop: Loop, *args: Any, **kw: Any) -> Any:
        if loop.optimizer.steps + 1 == BAD:
            next(p for p in loop.model.parameters() if p.ndim == 2).data.view(-1).view(torch.int32)[5] ^= 1
        return before(loop, *args, **kw)

    with on_rank_1("_update", flip):
        try:
            one_rank(settings)
        except MismatchError as error:
            return str(error)
    return ""


def test_a_bit_that_flips_on_one_rank_ends_the_run_before_it_is_saved(tmp_path):
    out = tmp_path / "run"
    settings = settings_of(out, faults={"check_replicas": 100}, checkpoints={"save_every": BAD}, zero={"stage": 1})
    said = run_ranks(2, corrupted, settings)
    assert said[0] == said[1] and "rank 0 and rank 1 hold different bits of wte.weight" in said[0], said
    assert not (out / "checkpoints").exists() or committed(Storage(), out / "checkpoints") == []


def slow(settings: Settings) -> Ended:
    def later(before: Any, loop: Loop, *args: Any) -> Any:
        time.sleep(SLOW_S)
        return before(loop, *args)

    with on_rank_1("_batch", later):
        return one_rank(settings)


def test_a_slow_rank_is_named_once_by_its_times(tmp_path):
    out = tmp_path / "run"
    run_ranks(2, slow, settings_of(out, steps={"steps": 12, "eval_every": 0}))
    rows = [row for row in read_metrics(out) if row["slowest_rank"] == 1]
    assert rows and all(row["slowest_s"] >= max(SLOW_S, row["compute_s"]) for row in rows), rows
    (warning,) = (row for row in read_warnings(out) if row["kind"] == "straggler")
    assert warning["message"].startswith("rank 1 computes ")


def test_a_straggler_is_slow_by_a_factor_in_several_rows():
    assert straggler([0.1]) == -1 and straggler([0.1, 0.1]) == -1 and straggler([0.3, 0.1, 0.1, 0.12]) == 0
    seen = Stragglers()
    rows = [[0.1, 0.3]] * (ROWS - 1) + [[0.3, 0.1]] + [[0.1, 0.3]] * ROWS
    assert [seen.found(row) is not None for row in rows] == [False] * (len(rows) - 1) + [True]


@pytest.mark.parametrize("wrong", [{"spike_norm": 1.0}, {"spike_loss": float("nan")}, {"check_replicas": -1}])
def test_wrong_settings_are_refused_by_their_flags(tmp_path, wrong):
    with pytest.raises(ConfigError, match="--" + next(iter(wrong)).replace("_", "-")):
        settings_of(tmp_path / "run", faults=wrong).check(2)


def test_a_rank_that_is_told_to_stop_and_cannot_in_time_hears_so():
    late: list[str] = []
    heard = threading.Event()
    with Stop(limit_s=0.01, on_late=lambda name: (late.append(name), heard.set())) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(60) and late == ["SIGTERM"] and stop.asked
    with Stop(limit_s=3600.0, on_late=late.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(60)
        assert not timer.is_alive(), "a deadline that was kept still runs"
    assert late == ["SIGTERM"]


def test_a_launch_that_cannot_save_in_time_says_so(tmp_path):
    out: Path = tmp_path / "run"
    config = config_file(
        out, steps={"steps": 10_000, "eval_every": 0}, checkpoints={"save_every": 3, "shutdown_s": 0.5}
    )
    with launched(out, "--config", str(config), "--ranks", "2") as launch:
        launch.wait_for(lambda: last_commit(out), "a checkpoint")
        os.kill(launch.rank_pids()[1], signal.SIGSTOP)  # so that nobody comes to the end of the step
        launch.process.terminate()
        code, _, err = launch.end()
        assert launch.gone()
    assert code == 128 + signal.SIGTERM
    last = err.splitlines()[-1]
    assert last.startswith("onefold: not saved: the ranks had not ended 0.5 s after SIGTERM (--shutdown-s)"), err
    assert "to go on from step-0" in last and "onefold train --resume --out" in last, err
