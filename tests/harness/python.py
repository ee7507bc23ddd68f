"""Python processes forked from one that has already imported torch, which saves each the seconds of that import.

    done = run_python("-c", "import torch; print(torch.ones(1))")
    with start_python("-m", "onefold.cli.main", "train", stdout=subprocess.PIPE) as process: ...

The template, one for each process of pytest, imports libraries and nothing of Onefold; it has one thread. For each
start it forks, and the copy becomes what `python WORDS` is: a child of the test's own, with its files, folder,
environment, arguments, session, exit code and pid. It forks twice, and the first child exits at once, so the kernel
makes the second a child of the test's process (PR_SET_CHILD_SUBREAPER). Variables that libraries read at import have
the template's values. Tests of imports, of the environment or of a clean interpreter start a new interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PATIENCE_S = 300.0  # as in patience.py; the template imports nothing of ours
LIBRARIES = ("numpy", "torch._dynamo", "torch.distributed.run", "safetensors.torch", "tyro", "rich.console")
# as `onefold train` has it: silent libraries, and one thread
SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "FATAL"}
FIXED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED")  # read at the start: the same in all copies
PADDING = "ONEFOLD_TEST_PADDING"  # a variable as long as the environment of a copy may be
PADDING_BYTES = 96 << 10
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 128 << 10  # bytes of what is said to the template


class Command(NamedTuple):
    """What a copy is to become."""

    words: tuple[str, ...]
    folder: str
    environment: dict[str, str]


# -- in the test's process ---------------------------------------------------------------------------------------------


class Forked(subprocess.Popen):
    """A Popen whose process is a copy of the template; `args` are what follows `python` on a command line."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
    ):  # fmt: skip
        assert not (pass_fds or preexec_fn or shell), "unsupported here; use subprocess.Popen"
        given = dict(os.environ if env is None else env)
        wanted = Command(tuple(map(str, args)), str(cwd or os.getcwd()), given)
        files = [own if file == -1 else file for own, file in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = template().start(wanted, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def start_python(*words: str | Path, **settings: Any) -> Forked:
    """As subprocess.Popen([sys.executable, *words], start_new_session=True, **settings)."""
    return Forked(words, **settings)


def run_python(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run([sys.executable, *words], capture_output=True, text=True)."""
    pipe = subprocess.PIPE
    with start_python(*words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as one:
        try:
            out, err = one.communicate(timeout=timeout)
        finally:
            one.kill()
    return subprocess.CompletedProcess(one.args, one.returncode, out, err)


class Template:
    """The process that is copied, which ends when this one does."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fixed = {name: os.environ.get(name) for name in FIXED}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
                env={**os.environ, **SETTINGS, PADDING: PADDING_BYTES * " "},
            )  # fmt: skip
        if self._line.recv(1) != b"!":
            raise RuntimeError(f"the template ended with {self._process.wait()} before it was ready")

    def start(self, wanted: Command, files: Sequence[int]) -> int:
        """The pid of a copy, which is a child of this process."""
        for name, value in self._fixed.items():
            assert wanted.environment.get(name) == value, f"{name} is read at the start: use a new interpreter"
        adopt_orphans(True)
        try:
            socket.send_fds(self._line, [json.dumps(wanted).encode()], list(files))
            pid = int(self._line.recv(MESSAGE_BYTES))  # from the process between the two
            assert self._line.recv(1) == b"!"  # that one has ended
        except BaseException:
            _templates.pop(os.getpid(), None)  # an answer that nobody took would be the next one's
            self._line.close()
            raise
        finally:
            adopt_orphans(False)
        return pid


_templates: dict[int, Template] = {}  # by process: a copy of this process has none


def template() -> Template:
    here = os.getpid()
    if here not in _templates:
        _templates[here] = Template()
    return _templates[here]


def adopt_orphans(really: bool) -> None:
    """Whether processes below this one whose parent ends become children of this one."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(really), 0, 0, 0) == 0


# -- in the template ---------------------------------------------------------------------------------------------------


def serve(line: socket.socket) -> Command | None:
    """In each forked process, what it is to run; in the template None, once the test's process has ended."""
    while True:
        said, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
        if not said:
            return None
        adopted, tell_adopted = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(tell_adopted)
            if pid := os.fork():
                line.send(str(pid).encode())
                os._exit(0)
            os.read(adopted, 1)  # until its parent is the test's process
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            line.detach()
            return Command(*json.loads(said))
        os.waitpid(between, 0)
        for file in (adopted, tell_adopted, *files):
            os.close(file)
        line.send(b"!")


def run_command(wanted: Command, paths: Sequence[str]) -> None:
    """What `python WORDS` does, with the libraries that are imported already."""
    os.setsid()
    os.chdir(wanted.folder)
    os.environ.clear()
    os.environ.update(wanted.environment)
    overwrite_proc_environ(wanted.environment)
    tempfile.tempdir = None  # it is found anew, from the environment
    sys.modules["numpy.random"].seed()  # torch's generators have their fixed seed, Python's has a new one
    kind, *rest = wanted.words
    first = {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).resolve().parent))
    asked = filter(None, wanted.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *map(os.path.abspath, asked), *paths]
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    assert kind == "-c" or not kind.startswith("-"), f"{kind} needs a new interpreter"
    sys.argv = [kind, *rest[1:]] if kind == "-c" else list(wanted.words)
    if kind != "-c":
        main.__file__ = kind
    text = rest[0] if kind == "-c" else Path(kind).read_bytes()
    exec(compile(text, "<string>" if kind == "-c" else kind, "exec"), main.__dict__)


def overwrite_proc_environ(environment: Mapping[str, str]) -> None:
    """/proc/PID/environ shows the memory where the kernel put the first environment; nothing else points there now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])  # env_start and env_end, the fields 50 and 51
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(text) <= end - start, f"an environment of {len(text)} bytes is too large for a copy"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def be_template(line: socket.socket) -> Command | None:
    gc.disable()  # nothing that is imported is garbage
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a library has started {threads - 1} threads, which a fork does not copy"
    gc.collect()
    gc.freeze()  # a collection in a copy would copy the pages of all this
    line.send(b"!")
    return serve(line)


if __name__ == "__main__":
    own = sys.path.pop(0)  # this folder, whose files are no libraries
    searched = [path for path in sys.path if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if asked := be_template(socket.socket(fileno=int(sys.argv[1]))):
        run_command(asked, searched)
