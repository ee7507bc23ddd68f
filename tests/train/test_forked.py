"""A forked rank finds what a rank in a new interpreter finds, and ends as that does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.cli.environment import QUIET
from onefold.cli.forked import forks
from onefold.errors import ConfigError
from tests.harness.patience import PATIENCE_S
from tests.train import probe

ROOT = Path(__file__).parents[2]  # ranks import the probe by its name


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("", id="threads by default"),
        pytest.param("OMP_NUM_THREADS", id="threads given", marks=pytest.mark.soak),
    ],
)
def both(request, tmp_path_factory):
    """By way of starting: what the launcher printed, and its folder."""
    running = {}
    for how in ("fork", "exec"):
        folder = tmp_path_factory.mktemp(how)
        env = {**os.environ, **QUIET, "OPENBLAS_NUM_THREADS": "1", "ONEFOLD_START": how, "PYTHONPATH": str(ROOT)}
        if not request.param:
            del env["OMP_NUM_THREADS"]
        pipe = subprocess.PIPE
        command = [sys.executable, probe.__file__, str(folder)]
        running[how] = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True), folder
    return {how: (process.communicate(timeout=PATIENCE_S), folder) for how, (process, folder) in running.items()}


def test_a_forked_rank_finds_what_a_new_interpreter_finds(both):
    randoms = set()
    for rank in range(2):
        forked, new = (json.loads((both[how][1] / f"{rank}.json").read_text()) for how in ("fork", "exec"))
        randoms |= {*forked.pop("random"), *new.pop("random")}
        for one, how in ((forked, "fork"), (new, "exec")):
            assert one["arguments"].pop() == str(both[how][1])
        assert forked == new
        assert forked["leads its session"] and forked["dies by"] == 9 and forked["warned again"] == 1
        assert forked["threads"] == 1 and forked["torch's threads"] == int(forked["environment"]["OMP_NUM_THREADS"])
    assert len(randoms) == 12, "two ranks have the same random numbers"


def test_a_forked_rank_ends_as_a_new_interpreter_ends(both):
    said = {}
    for how, ((out, err), folder) in both.items():
        assert out.splitlines()[-1] == "exit codes [7, 1]", err
        assert [(folder / f"{rank}.end").read_text() for rank in range(2)] == ["thread\nexit handler\n"] * 2
        traceback, _, error = err.rpartition("Traceback (most recent call last):")[2].rpartition("\n  File ")
        assert error.endswith("RuntimeError: of rank 1\n") and "launch" not in traceback
        said[how] = sorted(out.splitlines())
    assert said["fork"] == said["exec"], "something is missing, or written twice"
    assert len(said["fork"]) == 6


@pytest.mark.parametrize("wanted", ["spawn", "", "fork"])
def test_a_start_that_cannot_be_is_one_line(wanted, monkeypatch):
    monkeypatch.setenv("ONEFOLD_START", wanted)
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)  # as where torch was imported before
    with pytest.raises(ConfigError, match=r"use exec or fork|leave ONEFOLD_START unset"):
        forks()
    monkeypatch.delenv("ONEFOLD_START")
    assert not forks(), "it is a new interpreter where forking is not safe"


def test_the_command_that_starts_ranks_has_one_thread_once_its_libraries_are_imported():
    text = "import os, sys, onefold_command\nonefold_command.main()\nprint(len(os.listdir('/proc/self/task')))"
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS") and key not in QUIET}
    command = [sys.executable, "-c", text, "train", "--steps", "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "1\n", done.stderr
