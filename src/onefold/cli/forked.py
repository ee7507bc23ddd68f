"""A rank forked from the launcher, which has imported torch already: that takes a new interpreter seconds of CPU time.

1 Decide: only a process with one thread, no GPU driver and silent libraries is forked.  2 Fork.  3 Give the child what
a new interpreter would have: session, signals, descriptors, environment, threads, random numbers.  4 Run the command,
and end as an interpreter ends. Frames of the launcher stay in the child's memory: they are never returned to, and what
they refer to is never freed.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NoReturn

import torch

from onefold.cli.environment import QUIET
from onefold.cli.lifeline import die_with, flush_c, name_process
from onefold.cli.main import main
from onefold.errors import ConfigError

START = "ONEFOLD_START"  # exec: a new interpreter for every rank; fork: an error where the launcher cannot be forked
THREADS = "OMP_NUM_THREADS"
THREAD_SETTINGS = (THREADS, "MKL_NUM_THREADS")  # read when torch is imported
FLUSH_FAILED = 120  # Python's exit code
LONGEST_WAIT_S = 0.02  # between two looks at whether a process has ended


def forks() -> bool:
    """True if ranks are forked, False if each is a new interpreter; raises where ONEFOLD_START asks for what cannot be.

    >>> forks()
    False
    """
    wanted = os.environ.get(START)
    if wanted not in (None, "exec", "fork"):
        raise ConfigError(f"{START}={wanted!r} is unknown; use exec or fork, or leave it unset")
    if wanted == "exec":
        return False
    obstacle = _obstacle()
    if not obstacle:
        import torch._dynamo  # noqa: F401  once, here: making a model imports it, 2 s of CPU time in every rank

        obstacle = _obstacle()  # again: what was imported may have started threads
    if obstacle and wanted == "fork":
        raise ConfigError(f"{START}=fork, but {obstacle}; leave {START} unset")
    return not obstacle


def _obstacle() -> str:
    """Why this process cannot be forked; empty if it can."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return "this system does not say how many threads a process has"
    if any(name not in os.environ for name in QUIET):
        return "torch was imported before its libraries were silenced"
    if (threads := len(os.listdir(tasks))) > 1:
        return f"the launcher has {threads} threads, and a fork copies one"
    # also without a device: a driver that was asked once may refuse to answer the child
    if torch.cuda.device_count() or torch.version.hip or "libcuda.so" in Path("/proc/self/maps").read_text():
        return "a GPU's driver is loaded, which a forked process cannot use"
    return ""


class Forked:
    """A forked process; the part of subprocess.Popen that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative: ended by this signal

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: its exit code is lost
                ended, status = self.pid, 0
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.0005
        while self.poll() is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:  # else the number may be another's
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(command: Sequence[str], environment: Mapping[str, str], keep: Collection[int]) -> Forked:
    """Start `onefold …` in a copy of this process.

    `command` is its sys.argv, `environment` replaces this process's, `keep` are descriptors it inherits beside 0 to 2.
    """
    _flush()  # or the child would write it again
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler of the launcher runs in it
    try:
        pid = os.fork()
        if pid == 0:
            _be_rank(parent, command, environment, keep, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Forked(pid)


def _be_rank(
    parent: int, command: Sequence[str], environment: Mapping[str, str], keep: Collection[int], mask: set[int]
) -> NoReturn:
    """The life of the child. Nothing may leave this function: above it is the launcher's code, which ends all ranks."""
    code = 1
    try:
        gc.freeze()  # first: a collection would copy pages, and free what belongs to the launcher
        os.setsid()
        die_with(parent)
        name_process(f"onefold rank {environment['RANK']}")  # ps shows the launcher's command line
        _keep_descriptors(keep)
        _forget_handlers()
        _replace_environment(environment)
        _renew_random()
        with warnings.catch_warnings():
            pass  # Python forgets which warnings it has shown
        sys.argv = list(command)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = _exit_code(command[1:])
        code = _finish() or code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _keep_descriptors(keep: Collection[int]) -> None:
    """Closes what a new interpreter would not inherit: all but 0 to 2 and `keep`."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one that lists them
            if number in keep:
                os.set_inheritable(number, True)
            elif number > 2:
                os.close(number)
            elif not os.get_inheritable(number):  # it was closed when the launcher started, which has opened a file
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, number)
                os.close(nothing)


def _forget_handlers() -> None:
    """Default handlers, as a rank has them; what is ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _replace_environment(environment: Mapping[str, str]) -> None:
    threads_known = any(name in os.environ for name in THREAD_SETTINGS)
    os.environ.clear()
    os.environ.update(environment)
    if not threads_known:
        torch.set_num_threads(int(environment[THREADS]))


def _renew_random() -> None:
    """Other random numbers in every rank, as in new interpreters; Python has seeded its own generator at the fork."""
    torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()


def _exit_code(arguments: Sequence[str]) -> int:
    """The exit code of sys.exit(main(arguments)) in a new interpreter."""
    try:
        sys.exit(main(arguments))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # for exit handlers
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _finish() -> int:
    """What an interpreter does at its end: join threads, run exit handlers, flush. Returns an exit code if that fails.

    Exit handlers were registered by imports, in the launcher, which registers no others: a new rank has the same.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        _flush()
    except (OSError, ValueError):
        return FLUSH_FAILED
    return 0


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    flush_c()
