"""`onefold train`, or another command, as a user starts it, with everything it may leave behind looked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onefold.cli.launch import COMMAND
from onefold.train.run.records import read_lines
from tests.harness.patience import PATIENCE_S
from tests.harness.python import start_python

SHAPE = ("--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16")
SMALL = (*SHAPE, "--eval-windows", "4", "--log-every", "1", "--no-plan")
NAME = "onefold rank "
MARK = "ONEFOLD_TEST_MARK"  # in the environment of all that a launch starts: by it they are found again


class Launch:
    """A running `onefold train`, or another command that starts ranks."""

    def __init__(
        self, out: Path, *flags: str, command: str = "train", limit: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.out, self.mark = out, f"{out}/{time.monotonic_ns()}"
        where = ["--out", str(out)] if command == "train" else []
        words = [str(COMMAND), command, *where, *flags]
        settings: dict[str, Any] = {
            "env": {**os.environ, "XDG_CACHE_HOME": str(cache(out)), MARK: self.mark, **(env or {})},
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True,
        }  # fmt: skip
        if limit:
            words = ["sh", "-c", f'{limit}; exec "$@"', "sh", sys.executable, *words]
            self.process = subprocess.Popen(words, start_new_session=True, **settings)
        else:
            self.process = start_python(*words, **settings)

    def pids(self) -> list[int]:
        """All that it started and that still runs, itself included."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and f"{MARK}={self.mark}\0".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended just now, or is not ours
        return found

    def rank_pids(self) -> dict[int, int]:
        """Rank -> process: children that know their rank. Of a forked one the name says it, its environ is the
        launcher's."""
        found = {}
        for pid in children(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            ranks = [word[5:] for word in words if word.startswith(b"RANK=")]
            if name.startswith(NAME):
                ranks = [name.removeprefix(NAME)]
            found |= {int(rank): pid for rank in ranks}
        return found

    def steps(self) -> int:
        """The last step that is written down."""
        rows = read_lines(self.out / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def wait_for(self, what: Any, said: str = "what was waited for") -> Any:
        """Until `what()` is true; it must not end before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {said}: {self.process.communicate()}")
            assert time.monotonic() < deadline, f"{said} did not come"
            time.sleep(0.02)
        return found

    def end(self) -> tuple[int, str, str]:
        """Exit code and what it said, once it has ended."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def gone(self, within_s: float = 20.0, but: frozenset[int] | set[int] = frozenset()) -> bool:
        """Whether all that it started has ended, or does so soon; of those in `but` it is not asked."""
        deadline = time.monotonic() + within_s
        while set(self.pids()) - but and time.monotonic() < deadline:
            time.sleep(0.02)
        return not set(self.pids()) - but

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.communicate()


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []  # it ended just now


def cache(out: Path) -> Path:
    """Of tokens: one for all tests of a session."""
    return out.parent.parent / "cache"


@contextmanager
def launched(out: Path, *flags: str, **more: Any) -> Iterator[Launch]:
    launch = Launch(out, *flags, **more)
    try:
        yield launch
    finally:
        launch.kill()


def run(out: Path, *flags: str, **more: Any) -> tuple[int, str, str]:
    """To its end; nothing it started may be left."""
    with launched(out, *flags, **more) as launch:
        ended = launch.end()
        assert launch.gone(), f"still running: {launch.pids()}"
        return ended


def curve(out: Path) -> dict[int, tuple[float, float, float, float | None]]:
    """Step -> loss, gradient norm, learning rate, validation loss: to be compared bit for bit."""
    rows = read_lines(out / "metrics.jsonl")
    found = {row["step"]: (row["loss"], row["grad_norm"], row["lr"], row["val_loss"]) for row in rows}
    assert len(found) == len(rows), "a step is written down twice"
    return found
