"""A run that saves and prunes in a loop, and readers beside it: what is removed while it is read is not damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onefold.checkpoint.format.export import export
from onefold.checkpoint.format.folder import committed, find
from onefold.checkpoint.format.reading import TRIES, Checkpoint, with_newest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.verify import verify
from onefold.cli.checkpoint import checkpoints_in
from onefold.cli.main import main
from onefold.errors import CheckpointRemoved
from tests.checkpoint.drive import load, save

# Another process: saves step after step and keeps the newest one, until its standard input is closed.
PRUNER = """
import sys, select
from pathlib import Path
from onefold.checkpoint.format.storage import Storage
from tests.checkpoint.drive import save
run, step = Path(sys.argv[1]), 1
while not select.select([sys.stdin], [], [], 0)[0]:
    save(Storage(), run, step, keep=1)
    if step == 1:
        sys.stdout.write("saved\\n")
        sys.stdout.flush()
    step += 1
"""


@pytest.fixture(scope="module")
def pruned(tmp_path_factory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("pruned") / "run"
    job = subprocess.Popen(
        [sys.executable, "-c", PRUNER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdin is not None
    assert job.stdout.readline() == "saved\n"
    yield run
    assert job.poll() is None, "it must have pruned all the time"
    job.stdin.close()
    assert job.wait(60) == 0
    assert committed(Storage(), run)[0] > 10, "it must have pruned often"


def test_the_newest_is_read_whole_whatever_is_pruned_meanwhile(pruned):
    storage = Storage()
    steps: list[int] = []
    deadline_s = time.monotonic() + 60
    while len(set(steps)) <= 5:
        assert time.monotonic() < deadline_s, "it must have read several"
        steps.append(with_newest(storage, pruned, lambda path: load(storage, path)))
    assert steps == sorted(steps)


def test_a_checkpoint_that_is_removed_is_never_called_damaged(pruned):
    """How often a read meets a removal depends on what else the machine does."""
    storage, ends, deadline_s = Storage(), {"ok": 0, "removed": 0}, time.monotonic() + 120
    while min(ends.values()) < 5:
        assert time.monotonic() < deadline_s, f"both ends should have been seen: {ends}"
        try:
            path = find(storage, pruned)[0]
            assert verify(storage, path) == []
            ends["ok"] += 1
        except CheckpointRemoved as error:
            assert f"{path} was removed by its run while it was being read; newest is now step-" in str(error)
            ends["removed"] += 1


def test_the_commands_exit_with_0_beside_a_run_that_prunes(pruned, tmp_path, capsys):
    for number in range(12):
        assert main(["verify-checkpoint", str(pruned), "--json"]) == 0
        assert all(damages == [] for damages in json.loads(capsys.readouterr().out).values())
        assert main(["inspect", str(pruned), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == 3
        assert main(["export", str(pruned), str(tmp_path / f"out{number}")]) == 0
        capsys.readouterr()
    assert list(tmp_path.glob(".writing-*")) == [], "a try that was given up leaves nothing"


class Pruning(Storage):
    """Removes the checkpoint that is read, in the middle of it: at the n-th read."""

    def __init__(self, run: Path, reads: int) -> None:
        self._run, self._reads = run, reads

    def at(self, operation: str, path: Path) -> None:
        if operation == "read":
            self._reads -= 1
            if self._reads == 0:
                step = committed(Storage(), self._run)[-1]
                save(Storage(), self._run, step + 1, keep=1)


@pytest.mark.parametrize("reads", range(1, 11))
def test_wherever_in_the_reading_it_is_removed_it_is_not_called_damaged(tmp_path, reads):
    path = save(Storage(), tmp_path, 1)
    with pytest.raises(CheckpointRemoved, match=r"step-00000001 was removed by its run .* now step-00000002$"):
        verify(Pruning(tmp_path, reads), path)
    assert with_newest(Pruning(tmp_path, reads), tmp_path, lambda p: load(Pruning(tmp_path, 0), p)) == 2


def test_a_path_that_names_one_checkpoint_means_no_other(tmp_path):
    path, storage = save(Storage(), tmp_path, 1), Storage()
    checkpoint = Checkpoint(storage, path)
    save(storage, tmp_path, 2, keep=1)
    with pytest.raises(CheckpointRemoved, match="newest is now step-00000002"):
        checkpoint.whole("w", torch.empty(120))
    tries = []

    def read_late(chosen: Path) -> int:
        tries.append(chosen)
        save(storage, tmp_path, 3 + len(tries), keep=1)
        return load(storage, chosen)

    with pytest.raises(CheckpointRemoved, match="newest is now step-00000004"):
        with_newest(storage, save(storage, tmp_path, 3), read_late)
    assert len(tries) == 1
    with pytest.raises(CheckpointRemoved):
        with_newest(storage, tmp_path, read_late)
    assert len(tries) == 1 + TRIES, "a folder of checkpoints means the newest, again and again, but not for ever"


def test_what_is_missing_from_a_checkpoint_that_is_there_is_still_damage(tmp_path, capsys):
    path = save(Storage(), tmp_path, 1)
    (path / "rank-00001.safetensors").unlink()
    assert main(["verify-checkpoint", str(tmp_path)]) == 1
    assert "rank-00001.safetensors is missing; it holds w" in capsys.readouterr().out


def test_where_the_last_one_was_removed_that_is_said(tmp_path):
    path = save(Storage(), tmp_path, 1)
    checkpoint = Checkpoint(Storage(), path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointRemoved, match="while it was being read; none is left there"):
        checkpoint.file("rank-00000.safetensors")
    assert checkpoints_in(tmp_path) == tmp_path
    with pytest.raises(Exception, match="holds no committed checkpoint"):
        export(tmp_path, tmp_path / "out")
