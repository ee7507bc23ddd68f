"""Scripts that a test starts as a user would, each in a session of its own; nothing of them outlives the test."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.harness.python import start_python

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


def offspring(pid: int) -> Iterator[int]:
    """Children of a process, their children, and so on."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ended just now
            for child in map(int, task.read_text().split()):
                yield child
                yield from offspring(child)


@contextmanager
def scripts(**environ: str) -> Iterator[Start]:
    """Gives a function that starts this Python with the words it is given; output and errors come together."""
    started: list[subprocess.Popen[str]] = []
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])

    def start(*words: str) -> subprocess.Popen[str]:
        process = start_python(
            *words,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environ},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            for pid in [*offspring(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what lost its parent
            process.wait()
