"""examples/ray_train.py on a Ray cluster of this machine: a worker that is killed is replaced, and nothing is lost."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.harness import run_ranks
from tests.harness.patience import PATIENCE_S
from tests.harness.scripts import ROOT, Start, offspring, scripts

STEPS, EVERY = 600, 20
TOO_SLOW = "The current node timed out during startup"  # after 30 s, which Ray does not let one change
ATTEMPTS = 4


def by_itself(out: str) -> None:
    """On a rank: the loop of the example, without Ray."""
    config = {"stage": 2, "steps": STEPS, "save_every": EVERY, "out": out}
    importlib.import_module("examples.ray_train").train(config, lambda metrics: None)


def workers(pid: int) -> list[int]:
    """Processes of Ray Train that run the loop."""
    found = []
    for one in offspring(pid):
        with suppress(OSError):  # it ended just now
            if b"RayTrainWorker" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(HOME=str(tmp_path)) as one:  # where Ray writes its user's token
        yield one


def training(start: Start, out: Path) -> subprocess.Popen[str]:
    """A run with two workers and a checkpoint."""
    flags = ("--out", str(out), "--steps", str(STEPS), "--save-every", str(EVERY), "--max-failures", "1")
    for _ in range(ATTEMPTS):
        run, deadline_s = start(str(ROOT / "examples" / "ray_train.py"), *flags), time.monotonic() + PATIENCE_S
        while run.poll() is None:
            if any((out / "checkpoints").glob("step-*")) and len(workers(run.pid)) == 2:
                return run
            assert time.monotonic() < deadline_s, "no checkpoint came"
            time.sleep(0.02)
        said = run.communicate()[0]
        assert TOO_SLOW in said, said
    pytest.skip(f"Ray itself did not start in {ATTEMPTS} attempts of 30 s")


@pytest.mark.soak  # Ray's own start takes a minute or two on two cores
def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bits(start, tmp_path):
    run = training(start, tmp_path / "ray")
    os.kill(workers(run.pid)[1], signal.SIGKILL)
    said = run.communicate(timeout=2 * PATIENCE_S)[0]
    assert run.returncode == 0 and "goes on from step" in said, said

    run_ranks(2, by_itself, str(tmp_path / "plain"))
    last = f"step-{STEPS:08}"
    for rank in range(2):
        name = f"{last}/rank-{rank:05}.safetensors"
        ray, plain = (tmp_path / kind / "checkpoints" / name for kind in ("ray", "plain"))
        assert ray.read_bytes() == plain.read_bytes()
