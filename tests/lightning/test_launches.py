"""The example: on ranks with torchrun's environment, one of them killed; resumed by Lightning's launcher; failing."""

from __future__ import annotations

import csv
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch

from tests.harness import RankGroup, start_ranks
from tests.harness.patience import PATIENCE_S
from tests.harness.scripts import ROOT, Start, scripts

EXAMPLE = str(ROOT / "examples" / "lightning_trainer.py")
STEPS = 4  # of an epoch of two ranks


@pytest.fixture
def start() -> Iterator[Start]:
    with scripts() as one:
        yield one


def of_session(leader: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended just now
            fields = path.read_text().rpartition(")")[2].split()
            found += [path.parent.name] if fields[3] == str(leader) and fields[0] != "Z" else []
    return found


def losses(out: Path) -> dict[int, float]:
    """Step -> loss, of the newest log."""
    logs = sorted((out / "log").glob("version_*/metrics.csv"))
    if not logs:
        return {}
    with open(logs[-1], newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")}


def saved_steps(out: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (out / "last.ckpt").glob("step-*")), default=0)


def run_example(words: list[str]) -> None:
    """On a rank of its own."""
    sys.argv = [EXAMPLE, *words]
    runpy.run_path(EXAMPLE, run_name="__main__")


def kill_after_a_checkpoint(group: RankGroup, out: Path) -> None:
    """Kills a rank when steps have been logged after the newest checkpoint; the rank stands still while we look."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline_s, "no step after a checkpoint came"
        time.sleep(0.02)
        if not saved_steps(out):
            continue
        group.kill(1, signal.SIGSTOP)
        if max(losses(out), default=0) > saved_steps(out):
            group.kill(1)
            return
        group.kill(1, signal.SIGCONT)


def test_a_killed_run_goes_on_as_if_it_had_not_been_and_a_rank_that_raises_ends_all(start, tmp_path):
    words = ["--devices", "2", "--out", str(tmp_path), "--epochs", "1000", "--stage", "2"]
    with start_ranks(2, run_example, words, init=False) as group:
        kill_after_a_checkpoint(group, tmp_path)
        other, _ = group.join()
    assert other.exitcode != 0, "the other rank went on alone"
    done, first = saved_steps(tmp_path), losses(tmp_path)

    epochs = str(done // STEPS + 1)
    rest = start("-m", "tests.lightning.failing", "--devices", "2", "--out", str(tmp_path), "--epochs", epochs)
    said = rest.communicate(timeout=PATIENCE_S)[0]
    again, lost = losses(tmp_path), {step: loss for step, loss in first.items() if step >= done}
    assert list(again) == list(range(done, done + STEPS)) and lost and lost.items() <= again.items(), said
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert weights["head.weight"].shape == (256, 64)
    assert rest.returncode != 0 and "ArithmeticError: rank 1 gives up" in said, said
    deadline_s = time.monotonic() + PATIENCE_S
    while left := of_session(rest.pid):
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.02)
