"""Files that another user put into the current folder: none is imported. And signals before a command has started."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.patience import PATIENCE_S

COMMAND = Path(sys.executable).with_name("onefold")
pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="needs the installed onefold command")


def test_modules_in_the_current_folder_are_imported_neither_by_a_command_nor_by_its_ranks(tmp_path):
    for module in ("tyro", "torch", "json"):
        evil = f"open({str(tmp_path / f'{module} ran')!r}, 'w').close()\nraise SystemExit('planted')\n"
        (tmp_path / f"{module}.py").write_text(evil)
    words = ["verify", "--model", "gpt-tiny", "--ranks", "1"]
    done = subprocess.run([COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("* ran")) == []


def test_a_signal_while_a_command_starts_ends_it_in_one_line():
    chance = random.Random(3)
    for number in (signal.SIGINT, signal.SIGTERM):
        words = [COMMAND, "simulate", "--model", "8b"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline_s = time.monotonic() + 30
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # it imports torch, for seconds
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.005)
        time.sleep(chance.random())  # anywhere in it
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=30)
        assert err == f"onefold: ended by {signal.Signals(number).name}\n" and process.returncode == 128 + number, err
