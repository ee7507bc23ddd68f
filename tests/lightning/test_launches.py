"""The example as users start it: by Lightning's launcher and by torchrun; killed, resumed, and failing."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch

from tests.harness.patience import PATIENCE_S
from tests.harness.scripts import ROOT, Start, scripts
from tests.train.launched import children

EXAMPLE = str(ROOT / "examples" / "lightning_trainer.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
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


def ended(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, said
    return said


def losses(out: Path) -> dict[int, float]:
    """Step -> loss, of the newest log."""
    logs = sorted((out / "log").glob("version_*/metrics.csv"))
    if not logs:
        return {}
    with open(logs[-1], newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")}


def wait_for(process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


def saved_steps(out: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (out / "last.ckpt").glob("step-*")), default=0)


def test_a_killed_run_goes_on_as_if_it_had_not_been_also_with_other_ranks_and_stage(start, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    run = start(EXAMPLE, "--devices", "2", "--out", str(cut), "--epochs", "1000")
    wait_for(run, lambda: saved_steps(cut) > 0 and max(losses(cut), default=0) > saved_steps(cut))
    (child,) = children(run.pid)
    os.kill(child, signal.SIGKILL)
    run.communicate(timeout=PATIENCE_S)
    assert run.returncode != 0, "rank 0 went on alone"

    done = saved_steps(cut)
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["cp", "-r", str(cut / "last.ckpt"), str(other)], check=True)
    epochs = str(done // STEPS + 1)
    both = [
        start(EXAMPLE, "--devices", "2", "--out", str(cut), "--epochs", epochs),
        start(*TORCHRUN, EXAMPLE, "--devices", "2", "--out", str(whole), "--epochs", epochs, "--stage", "2"),
        start(EXAMPLE, "--devices", "1", "--out", str(other), "--epochs", epochs, "--stage", "0"),
    ]
    for process in both:
        ended(process)
    straight = losses(whole)
    assert {step: loss for step, loss in straight.items() if step >= done} == losses(cut) and len(losses(cut)) == STEPS
    alone = losses(other)
    assert list(alone) == [done + n for n in range(2 * STEPS)]  # one rank takes twice as many batches
    assert max(alone.values()) < straight[0]
    weights = torch.load(whole / "weights.ckpt", weights_only=True)["state_dict"]
    assert weights["head.weight"].shape == (256, 64)


def test_a_rank_that_raises_ends_all(start):
    run = start("-m", "tests.lightning.failing")
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode != 0 and "ArithmeticError: rank 1 gives up" in said
    deadline_s = time.monotonic() + PATIENCE_S
    while left := of_session(run.pid):
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.02)
