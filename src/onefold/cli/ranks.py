"""Local ranks as child processes: start them, read what they send, see whether they are stopped, kill them.

Their rendezvous is a file without a name (memfd) that only this user can open, and they talk over loopback: a local run
opens no port that another machine could reach, and leaves no file behind however it ends. Each rank leads a session of
its own, so that Ctrl-C in a terminal reaches the launcher alone, and what a rank has started ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from onefold.cli.environment import QUIET
from onefold.cli.forked import Forked, fork, forks
from onefold.cli.lifeline import STOP, die_with
from onefold.comm.last_words import LINE
from onefold.comm.rendezvous import GLOO, LOOPBACK, NCCL, NCCL_LOOPBACK, STORE

REAP_S = 0.5
LONGEST = 1 << 24  # bytes of one line that a rank says


class Said(NamedTuple):
    """A line that a rank sent over its lifeline."""

    rank: int
    text: bytes


class Rank:
    """One rank's process and the lifeline to it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes] | Forked, line: socket.socket) -> None:
        self.rank, self.process, self.line = rank, process, line
        self.stopped_s: float | None = None  # since when the kernel says that it is stopped
        self._heard, self._ended = b"", False

    def hear(self) -> list[Said] | None:
        """The complete lines that have arrived; None once the line is closed."""
        try:
            said = os.read(self.line.fileno(), 1 << 16)
        except BlockingIOError:  # a process that the rank started has the line open, and says nothing
            return None
        except OSError:
            said = b""
        if not said or len(self._heard) > LONGEST:
            return None
        *whole, self._heard = (self._heard + said).split(b"\n")
        return [Said(self.rank, text) for text in whole]

    def update_stopped(self) -> None:
        """Asks the kernel whether the rank is stopped (SIGSTOP, SIGTSTP)."""
        stopped = self.process.poll() is None and _state(self.process.pid) == "T"
        self.stopped_s = (self.stopped_s or time.monotonic()) if stopped else None

    def tell_to_stop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended just now
            self.line.sendall(STOP)

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kills the rank at once, with all processes that it has started."""
        if not self._ended:  # once: later the number may be another's
            self._ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()


class Ranks:
    """All ranks of one start."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.all = ranks
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.line, selectors.EVENT_READ, rank)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.all)

    def listen(self, timeout_s: float) -> list[Said]:
        """The lines that ranks send until the time is up; returns early when one sends a line or ends."""
        found: list[Said] = []
        if not self._selector.get_map():
            time.sleep(timeout_s)  # all lines are closed, and processes are about to end
        for key, _ in self._selector.select(timeout_s) if self._selector.get_map() else ():
            rank: Rank = key.data
            said = rank.hear()
            if said is None:
                self._selector.unregister(rank.line)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(REAP_S)  # now, so that its exit is dated before its peers' errors
            else:
                found += said
        return found

    def end(self) -> list[Said]:
        """Kills all ranks; returns the lines that they had sent before."""
        for rank in self.all:
            rank.end()
        found: list[Said] = []
        for rank in self.all:
            rank.process.wait()
            rank.line.setblocking(False)
            while (said := rank.hear()) is not None:
                found += said
        self._selector.close()
        for rank in self.all:
            rank.line.close()
        return found


@contextlib.contextmanager
def private_file(text: str = "") -> Iterator[str]:
    """Path of a file that only this process and children that inherit its descriptor can open (memfd)."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="onefold-") as folder:  # macOS
            path = Path(folder) / "file"
            path.write_text(text)
            yield str(path)
        return
    file = os.memfd_create("onefold")
    try:
        os.write(file, text.encode())
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


@contextlib.contextmanager
def started(
    count: int, command: Sequence[str], *, restart: int, own: bool, files: Sequence[str] = ()
) -> Iterator[Ranks]:
    """Ranks of a command, which have ended when the block ends.

    `own` says that the command is one of Onefold's: torch's libraries are silent, and ranks are forked where that is
    safe. `files` are private ones that the ranks read.
    """
    forked = own and forks()
    with private_file() as store:
        ranks: list[Rank] = []
        both = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), GLOO: LOOPBACK, NCCL: NCCL_LOOPBACK,
            **(QUIET if own else {}), **os.environ, STORE: store, "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(restart),
        }  # fmt: skip
        inherited = [int(Path(path).name) for path in (store, *files) if path.startswith("/proc/self/fd/")]
        try:
            for rank in range(count):
                ours, theirs = socket.socketpair()
                its = {"RANK": str(rank), "LOCAL_RANK": str(rank), LINE: str(theirs.fileno())}
                with theirs:
                    keep = [theirs.fileno(), *inherited]
                    process = fork(command[1:], both | its, keep) if forked else _new(command, both | its, keep)
                ranks.append(Rank(rank, process, ours))
            yield Ranks(ranks)
        finally:
            for one in ranks:
                one.end()
            for one in ranks:
                one.process.wait()


def _new(command: Sequence[str], environment: dict[str, str], keep: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts a command in a new interpreter."""
    return subprocess.Popen(
        command, env=environment, start_new_session=True, pass_fds=keep,
        preexec_fn=functools.partial(die_with, os.getpid()),  # two system calls, and no lock is taken
    )  # fmt: skip


def _state(pid: int) -> str:
    """The state letter of a process in /proc: T if it was stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
