"""A CUDA MPS daemon of one's own: processes that share a GPU compute side by side instead of in turns.

Each daemon has its own folders, so another daemon on the machine is not disturbed. If the environment names a daemon,
that one is used, since a GPU has one at a time. Without MPS, ranks take turns on the GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMMAND = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
ANSWER_S = 20.0  # for the daemon to start, or to say something
END_S = 10.0


class Mps(NamedTuple):
    """A running daemon. Processes that are to use it need its environment."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        pipe, log = str(self.folder / "pipe"), str(self.folder / "log")
        return {PIPE: pipe, "CUDA_MPS_LOG_DIRECTORY": log}

    def start(self) -> None:
        for folder in self.environ.values():
            Path(folder).mkdir()
        nowhere = subprocess.DEVNULL  # a pipe would stay open for as long as the daemon lives
        subprocess.run(
            [COMMAND, "-d"], stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=ANSWER_S, check=True,
            env={**os.environ, **self.environ},
        )  # fmt: skip

    def ask(self, said: str) -> str:
        run = subprocess.run(
            [COMMAND], input=f"{said}\n", text=True, capture_output=True, timeout=ANSWER_S, check=True,
            env={**os.environ, **self.environ},
        )  # fmt: skip
        return run.stdout

    def servers(self) -> list[int]:
        return [int(word) for word in self.ask("get_server_list").split() if word.isdigit()]

    def daemon(self) -> int | None:
        path = self.folder / "pipe" / f"{COMMAND}.pid"
        text = path.read_text().strip() if path.exists() else ""
        return int(text) if text.isdigit() else None


@contextlib.contextmanager
def mps_daemon() -> Iterator[Mps | None]:
    """A daemon while the block runs; None where the environment names one, where there is no MPS, or where it does not
    start."""
    if PIPE in os.environ or shutil.which(COMMAND) is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        mps = Mps(Path(folder))
        try:
            mps.start()
        except (OSError, subprocess.SubprocessError):
            yield None
            return
        try:
            yield mps
        finally:
            end(mps)


def end(mps: Mps) -> None:
    """Ends the daemon and its servers, if need be by force: a server whose client was killed may not answer."""
    pids: list[int] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        pids += mps.servers()
    pids += [pid for pid in [mps.daemon()] if pid]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        mps.ask("quit")
    if _outlived(pids, END_S):
        for pid in filter(running, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _outlived(pids, ANSWER_S)


def _outlived(pids: list[int], patience_s: float) -> bool:
    """Waits until none of these processes runs; True if one still does then."""
    deadline_s = time.monotonic() + patience_s
    while (left := any(map(running, pids))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def running(pid: int) -> bool:
    """True while a process of this number exists and is MPS's."""
    try:
        return b"nvidia-cuda-mps" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
