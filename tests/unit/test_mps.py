"""A CUDA MPS daemon is started in a folder of its own, ended with its block, and done without where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.mps import COMMAND, PIPE, mps_daemon, running

# What the control program does that matters here: a daemon that writes its number, and a prompt that ends it. The real
# one needs a GPU.
PROGRAM = """#!/bin/bash
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    [ -z "$FAILS" ] || exit 1
    (exec -a nvidia-cuda-mps-control sleep 60) & echo $! > "$pid"
    until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done
else
    read said
    if [ "$said" = quit ]; then [ -n "$STUBBORN" ] || kill $(cat "$pid"); fi
fi
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / COMMAND
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)


@pytest.mark.parametrize("stubborn", ["", "yes"])
def test_a_daemon_lives_as_long_as_its_block(program: None, stubborn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUBBORN", stubborn)
    monkeypatch.setattr("tests.harness.mps.END_S", 0.5)
    with pytest.raises(KeyError, match="inside"), mps_daemon() as mps:
        assert mps is not None
        pid = mps.daemon()
        assert pid is not None and running(pid)
        assert all(Path(folder).is_dir() for folder in mps.environ.values())
        raise KeyError("inside")
    assert not running(pid) and not mps.folder.exists()


def test_a_daemon_that_the_environment_names_is_used(
    program: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path))
    with mps_daemon() as mps:
        assert mps is None


def test_without_mps_ranks_take_turns(program: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "yes")
    with mps_daemon() as mps:
        assert mps is None
    monkeypatch.setenv("PATH", "/nowhere")
    with mps_daemon() as mps:
        assert mps is None
