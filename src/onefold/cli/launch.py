"""Starts a command again as local ranks, through torch's own launcher, unless it is one of them already.

`Launcher` passes a signal on and waits for the ranks to finish their step and save, it lets lost ranks be started
again, and nothing outlives it. `run_ranks` is for a command that gives a result: a signal ends it at once.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from onefold.cli.lifeline import LAUNCHER, LINE, STOP, Lifeline
from onefold.errors import CommError, MismatchError, OnefoldError
from onefold.train.stop import Stop

RESULT = "ONEFOLD_RESULT"  # the file in which rank 0 leaves what it found
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks that start again read addresses of dead ones
QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch's profiler tells of its stages on the screen
TICK_S = 0.05
SHORT, LONGEST_BYTES = "/tmp", 64  # of macOS's 104 for a socket's path our own names take 30
GRACE_S = 1.0  # from the first error of a rank until all are ended: the others may know more


def is_rank() -> bool:
    return "RANK" in os.environ


def run_ranks(ranks: int, arguments: Sequence[str]) -> Any:
    """Run `onefold ARGUMENTS` on `ranks` local processes; what rank 0 left. Raises what a rank said went wrong."""
    with tempfile.TemporaryDirectory(prefix="onefold-") as folder:
        result = Path(folder) / "result.json"
        launcher = Launcher(ranks, arguments, max_restarts=0, shutdown_s=0, environment={RESULT: str(result)})
        outcome = launcher.run()
        if outcome.code or not result.exists():
            raise OnefoldError(outcome.message or "the ranks ended without a result; what they said stands above")
        return json.loads(result.read_text())


def leave(result: Any) -> None:
    """Of rank 0, for the process that started the ranks."""
    if os.environ.get("RANK") == "0" and RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(result))


def give_up(line: Lifeline, error: Exception) -> NoReturn:
    """Of a rank: say why, and end at once. Peers must not wait, and nothing half done is to be saved."""
    rank = int(os.environ["RANK"])
    known = isinstance(error, OnefoldError)
    level = 0 if isinstance(error, CommError) else 1 if isinstance(error, MismatchError) else 2
    if not known:
        traceback.print_exc()
    message = str(error) if known else f"{type(error).__name__}: {error}"
    if line.there:
        line.say({"rank": rank, "error": message, "level": level})
    else:
        say(f"rank {rank}: {message}")
    sys.stdout.flush()
    os._exit(1)


def _command(launcher: str, ranks: int, restarts: int, arguments: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", str(restarts), "-m", "--", "onefold.cli.main", *arguments,
    ]  # fmt: skip  # --: else torchrun takes --master for the beginning of flags of its own


class Told(NamedTuple):
    """What a rank said went wrong."""

    rank: int
    message: str
    level: int  # 2: its own mistake  1: it heard of another's  0: a peer was gone

    @property
    def final(self) -> bool:
        """Another start would not help."""
        return self.level > 0


class Outcome(NamedTuple):
    """How the ranks ended; without a message, well."""

    code: int
    message: str = ""


class Launcher:
    """Ranks of one command, from their start to their end."""

    def __init__(
        self, ranks: int, arguments: Sequence[str], *, max_restarts: int, shutdown_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._ranks, self._arguments, self._environment = ranks, arguments, environment or {}
        self._max_restarts, self._shutdown_s = max_restarts, shutdown_s
        self._restart = 0
        self._told: list[Told] = []
        self._ended: dict[int, int] = {}
        self._lines: dict[socket.socket, bytes] = {}
        self._stopped_s: float | None = None

    def run(self) -> Outcome:
        with (
            tempfile.TemporaryDirectory(prefix="onefold-", dir=_short()) as folder,
            socket.socket(socket.AF_UNIX) as server,
            selectors.DefaultSelector() as self._selector,
            Stop() as stop,
        ):
            path = str(Path(folder) / "line")
            server.bind(path)
            server.listen(self._ranks + 1)
            self._selector.register(server, selectors.EVENT_READ)
            threads = str(max(1, (os.cpu_count() or 1) // self._ranks))
            environment = {
                "OMP_NUM_THREADS": threads,
                **QUIET,
                **os.environ,
                **self._environment,
                LINE: path,
                LAUNCHER: str(os.getpid()),
                **OWN_STORE,
            }
            command = _command("onefold.cli.agent", self._ranks, self._max_restarts, self._arguments)
            agent = subprocess.Popen(command, env=environment, start_new_session=True)
            try:
                self._watch(agent, stop)
            finally:
                agent.kill()
                agent.wait()
                while self._listen(0):
                    pass
                for line in self._lines:  # whatever still runs ends now
                    line.close()
            return self._outcome(agent.returncode)

    def _watch(self, agent: subprocess.Popen[bytes], stop: Stop) -> None:
        failed_s = None
        while agent.poll() is None:
            self._listen(TICK_S)
            now = time.monotonic()
            if stop.asked and self._stopped_s is None:
                self._stopped_s = now
                for line in self._lines:
                    _send_stop(line)
            if self._stopped_s is not None and now - self._stopped_s >= self._shutdown_s:
                late = f"the ranks had not ended {self._shutdown_s:g} s after the signal"
                self._told.append(Told(-1, late if self._shutdown_s else "ended by a signal", 2))
                return
            if any(told.final for told in self._told):
                failed_s = failed_s or now
                if now - failed_s > GRACE_S or len({told.rank for told in self._told}) == self._ranks:
                    return

    def _listen(self, timeout_s: float) -> bool:
        """Whether anything came."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            source: Any = key.fileobj
            if source not in self._lines:
                line, _ = source.accept()
                self._lines[line] = b""
                self._selector.register(line, selectors.EVENT_READ)
                if self._stopped_s is not None:
                    _send_stop(line)
            else:
                self._hear(source)
        return bool(events)

    def _hear(self, line: socket.socket) -> None:
        try:
            said = os.read(line.fileno(), 1 << 16)
        except OSError:
            said = b""
        if not said:
            self._selector.unregister(line)
            self._lines.pop(line)
            line.close()
            return
        *whole, self._lines[line] = (self._lines[line] + said).split(b"\n")
        for text in whole:
            self._understand(json.loads(text))

    def _understand(self, said: dict[str, Any]) -> None:
        if "ended" in said:
            self._ended = {int(rank): code for rank, code in said["ended"].items()}
        elif "error" in said:
            self._told.append(Told(said["rank"], said["error"], said["level"]))
        elif said["restart"] > self._restart:
            self._restart = said["restart"]
            why = f" ({self._told[0].message.split('; ')[0]})" if self._told else ""
            self._told = []
            say(f"a rank was lost; start {self._restart} of {self._max_restarts} again, from the last checkpoint{why}")

    def _outcome(self, code: int) -> Outcome:
        if code == 0:
            return Outcome(0)
        own = sorted(self._told, key=lambda told: (-told.level, told.rank))
        killed = [
            f"rank {rank} was killed by {_signal(code)}" for rank, code in sorted(self._ended.items()) if code < 0
        ]
        if own and own[0].final:
            return Outcome(1, own[0].message)
        if killed:
            return Outcome(1, ", ".join(killed))
        if own:
            return Outcome(1, own[0].message)
        if code == -signal.SIGKILL:
            return Outcome(1, "the process that watches the ranks was killed by SIGKILL, and the ranks with it")
        return Outcome(1, "the ranks ended without a word; what they said stands above")


def say(message: str) -> None:
    sys.stderr.write(f"onefold: {message}\n")
    sys.stderr.flush()


def _short() -> str | None:
    """Where a socket can be: its path may have about 100 bytes, which a folder for temporary files may need alone."""
    return SHORT if len(os.fsencode(tempfile.gettempdir())) > LONGEST_BYTES else None


def _send_stop(line: socket.socket) -> None:
    try:
        line.sendall(STOP)
    except OSError:
        pass  # it has ended just now


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
