"""Another user of the machine: the command line with the rights of nobody, for tests that play the neighbour."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from onefold.cli.main import main

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

# Loads what commands need, becomes another user for good, and runs commands one after the other.
DRIVER = """
import contextlib, importlib, io, json, os, sys, traceback
import tyro, matplotlib.figure, matplotlib.backends.backend_svg, matplotlib.backends.backend_agg
from onefold.cli.main import COMMANDS, main
for command in COMMANDS.values():
    importlib.import_module(command.module)
importlib.import_module('tomllib' if sys.version_info >= (3, 11) else 'tomli')
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = -1
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class End(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class User:
    """A process of another user, which runs one command after the other."""

    def __init__(self, uid: int) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def run(self, *arguments: object) -> End:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(map(str, arguments))) + "\n")
        self._process.stdin.flush()
        with no_longer_than(60):
            return End(*json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """A command that waits for a pipe's writer, or reads a device without end, fails its test instead of the suite."""

    def over(number: int, frame: object) -> None:
        raise AssertionError(f"it hangs: no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_here(*arguments: object) -> End:
    """The same in this process, as this user."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), no_longer_than(60):
        code = main(list(map(str, arguments)))
    return End(code, out.getvalue(), err.getvalue())


def one_line(end: End, *words: str) -> bool:
    """A refusal as it should be: exit code 2, nothing on stdout, one line on stderr, with these words."""
    start = end.err.startswith("onefold: ") and end.err.count("\n") == 1
    return end.code == 2 and end.out == "" and start and all(word in end.err for word in words)
