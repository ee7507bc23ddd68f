"""However a process ends, in the middle of writing, it leaves no name and no used block behind, and does not hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from onefold.offload.disk import Scratch
from tests.tiers.places import filled, on_tmpfs

MIB = 1 << 20
FILE_BYTES = 8 * MIB
LATEST_S = 200

SCRIPT = """
import os, sys
from onefold.offload.disk import Scratch
from onefold.offload.host_memory import host_bytes

for way in ("returns", "raises"):
    if child := os.fork():
        print(way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    scratch, buffer = Scratch(sys.argv[1], 0), host_bytes(1 << 20, pinned=False)
    files = [scratch.file(1 << 20, f"file {number}") for number in range(8)]
    asked = [file.write(buffer) for file in files for _ in range(100)]
    if way == "raises":
        raise RuntimeError("on purpose")
    break  # and the interpreter ends
"""


class Ended(NamedTuple):
    taken: int  # bytes, while it ran
    exitcode: int
    names: list[str]  # what was left
    kept: int  # bytes, afterwards


def free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def killed(folder: Path, number: int) -> Ended:
    before = free_bytes(folder)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        file = Scratch(folder, FILE_BYTES).file(FILE_BYTES, "the state")
        while True:  # until the signal comes
            pending = file.write(filled(FILE_BYTES, 1))
            os.write(writing, b".")
            pending.wait()
    os.read(reading, 1)
    taken = before - free_bytes(folder)
    os.kill(child, number)
    _, status = os.waitpid(child, 0)
    return Ended(taken, os.waitstatus_to_exitcode(status), os.listdir(folder), before - free_bytes(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_nothing(tmp_path, number):
    ended = on_tmpfs(killed, tmp_path, "size=16m", number)
    assert ended == Ended(taken=FILE_BYTES, exitcode=-number, names=[], kept=0)


def ended_by_themselves(folder: Path) -> tuple[str, str, list[str], int]:
    before = free_bytes(folder)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S)
    return ended.stdout, ended.stderr, os.listdir(folder), before - free_bytes(folder)


def test_processes_that_end_with_requests_on_the_way_do_not_hang_and_leave_nothing(tmp_path):
    out, err, names, kept = on_tmpfs(ended_by_themselves, tmp_path, "size=16m")
    assert out == "returns 0\nraises 1\n"
    assert err.strip().endswith("RuntimeError: on purpose") and err.count("Error") == 1
    assert names == [] and kept == 0
