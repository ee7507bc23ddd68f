"""The plan is asked before a run starts, also by ranks that torchrun has started."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from onefold.cli.launch import COMMAND
from onefold.train.run.records import read_lines
from tests.harness.patience import PATIENCE_S
from tests.harness.python import start_python
from tests.train.launched import SHAPE, cache


def as_torchrun_starts_it(out: Path, *flags: str, terminal: bool = False) -> tuple[int, str]:
    """The exit code of a rank alone, and its stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return started(out, *flags, env={**place, **ranks}, terminal=terminal)


def started(out: Path, *flags: str, env: dict[str, str], terminal: bool) -> tuple[int, str]:
    """The exit code of a run, and its stderr."""
    env = {**os.environ, **env, "XDG_CACHE_HOME": str(cache(out)), "CUDA_VISIBLE_DEVICES": ""}
    read, write = os.openpty() if terminal else os.pipe()
    words = (COMMAND, "train", "--out", str(out), *flags)
    process = start_python(*words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write)
    os.close(write)
    said = b""
    try:
        while more := _read(read):
            said += more
        return process.wait(timeout=PATIENCE_S), said.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(read)


def _read(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except OSError:  # a terminal whose last writer is gone
        return b""


def few(folder: Path) -> tuple[str, ...]:
    """The flags of a run of one step."""
    (folder / "text.txt").write_text("to be or not to be\n" * 400)
    return (*SHAPE, "--steps", "1", "--eval-windows", "2", "--save-every", "0", "--data", str(folder / "text.txt"))


def test_an_elastic_run_says_once_what_is_planned_though_it_asks_for_two_numbers_of_ranks(tmp_path):
    code, said = started(tmp_path / "c" / "run", "--elastic", "1:2", *few(tmp_path), env={}, terminal=True)
    assert code == 0 and said.count("onefold: Planned: ") == said.count("onefold: Expect ") == 1, said


def test_a_rank_of_torchrun_says_on_a_terminal_what_is_planned_and_what_it_waits_for(tmp_path):
    code, said = as_torchrun_starts_it(tmp_path / "a" / "run", *few(tmp_path), terminal=True)
    lines = said.splitlines()
    assert code == 0, said
    assert lines[0] == "onefold: Planned: stage 3, batch 4, activations keep, no offload."
    assert lines[1].startswith("onefold: On each rank: parameters ")
    assert lines[2].startswith("onefold: Expect ") and lines[2].endswith(" at the peak.")
    assert len(read_lines(tmp_path / "a" / "run" / "metrics.jsonl")) >= 1
    assert lines[3:] == ["onefold: writing the report …"]


def test_a_rank_of_torchrun_refuses_what_cannot_fit_before_it_reads_data(tmp_path):
    out = tmp_path / "b" / "run"
    code, said = as_torchrun_starts_it(out, "--model", "1t", "--data", "/no/such/folder")
    assert code != 0 and said.count("\n") == 1
    assert "stage 3 does not fit: the plan for 1," in said and not out.exists()
