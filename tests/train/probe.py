"""A command that writes down what a rank finds in its process, and the launcher that starts two such ranks.

`python probe.py FOLDER` is the launcher; its ranks are forked or new interpreters, as ONEFOLD_START says.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import torch._dynamo
import tyro

import onefold_command
from onefold.cli.main import COMMANDS, Command
from onefold.cli.ranks import private_file, started
from onefold.train.run.stop import Stop

PR_GET_PDEATHSIG = 2
LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p


@dataclass(frozen=True)
class Probe:
    """What a rank finds, as FOLDER/RANK.json, and what it does at its end, as FOLDER/RANK.end."""

    folder: Annotated[Path, tyro.conf.Positional]

    def run(self) -> int:
        rank = os.environ["RANK"]
        (self.folder / f"{rank}.json").write_text(json.dumps(found()))
        end = self.folder / f"{rank}.end"
        atexit.register(append, end, "exit handler")
        main_ends = threading.Event()
        thread = threading.Thread(target=lambda: (main_ends.wait(), append(end, "thread")))
        thread.start()
        threading._register_atexit(main_ends.set)  # called when the interpreter begins to end
        sys.stdout.write(f"rank {rank} by Python\n")
        LIBC.printf(f"rank {rank} by C\n".encode())
        if rank == "1":
            raise RuntimeError("of rank 1")
        return 7


def found() -> dict[str, Any]:
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]
            if not kind.startswith("/sys/"):  # torch reads there what an ARM processor can do, and leaves it open
                files[name] = f"{kind} {os.get_inheritable(int(name))}"
        except OSError:
            continue  # the one that lists them
    status = Path("/proc/self/status").read_text().splitlines()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    shown: list[object] = []
    warnings.showwarning = lambda *about: shown.append(about)  # type: ignore[assignment]
    warn()
    death = ctypes.c_int()
    LIBC.prctl(PR_GET_PDEATHSIG, ctypes.byref(death), 0, 0, 0)
    return {
        "files": files,
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "handlers": {int(number): str(handler) for number, handler in handlers.items() if not callable(handler)},
        "wakeup": signal.set_wakeup_fd(-1),
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "dies by": death.value,
        "threads": len(os.listdir("/proc/self/task")),
        "torch's threads": torch.get_num_threads(),
        "environment": {key: value for key, value in os.environ.items() if key != "ONEFOLD_START"},
        "environment in C": {key: str(LIBC.getenv(key.encode())) for key in ("RANK", "OMP_NUM_THREADS", "GONE")},
        "arguments": sys.argv,
        "exit handlers": [atexit._ncallbacks(), len(weakref.finalize._registry)],  # type: ignore[attr-defined]
        "warned again": len(shown),
        "line buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "random": [random.random(), numpy.random.random(), torch.rand(()).item()],
    }


def warn() -> None:
    warnings.warn("something", UserWarning, stacklevel=1)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def launch(folder: Path) -> None:
    """Starts two ranks from a process that is not as a new interpreter is; prints their exit codes."""
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)
    warn()
    secret, closed = os.pipe()
    os.set_inheritable(secret, True)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.set_blocking(closed, False)
    signal.set_wakeup_fd(closed)
    sys.stdout.write("launcher, once\n")
    command = [sys.executable, __file__, "probe", str(folder)]
    with Stop(), private_file("text") as file, started(2, command, restart=0, own=True, files=[file]) as ranks:
        codes = [rank.process.wait() for rank in ranks]
    sys.stdout.write(f"exit codes {codes}\n")


if __name__ == "__main__":
    COMMANDS["probe"] = Command("tests.train.probe", "Probe", "what a rank finds")
    if "RANK" in os.environ:
        sys.exit(onefold_command.main())
    launch(Path(sys.argv[1]))
