"""A Python process forked from one that has imported torch finds what a new interpreter finds, and ends as one does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.python import LIBRARIES, run_python, start_python

FOUND = """
import atexit, json, os, signal, sys
atexit.register(print, "at exit")
from pathlib import Path
status = Path("/proc/self/status").read_text().splitlines()
print(json.dumps({
    "words": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ),
    "shown": Path("/proc/self/environ").read_bytes().rstrip(b"\\0").decode().split("\\0"),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "main": sys.modules["__main__"].__name__,
    "here": "status" in vars(sys.modules["__main__"]),
    "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals()) if number != 2],
    "onefold": "onefold" in sys.modules, "tests": "tests" in sys.modules, "said": sys.stdin.read(),
}))
sys.stderr.write("an error")
sys.exit(7)
"""


def ended(process: subprocess.Popen) -> tuple[dict, str, int]:
    out, err = process.communicate("hello", timeout=60)
    found, last = out.splitlines()
    assert last == "at exit"
    return json.loads(found), err, process.returncode


@pytest.mark.parametrize("kind", ["-c", "-m", "a file"])
def test_a_forked_process_finds_and_says_what_a_new_interpreter_does(tmp_path: Path, kind: str):
    (tmp_path / "script.py").write_text(FOUND)
    words = {"-c": ["-c", FOUND], "-m": ["-m", "script"], "a file": [str(tmp_path / "script.py")]}[kind]
    pipe = subprocess.PIPE
    settings = {
        "env": {**os.environ, "PYTHONPATH": f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}", "MINE": "a b"},
        "cwd": tmp_path, "stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True,
    }  # fmt: skip
    forked = ended(start_python(*words, "one", "two", **settings))
    new = ended(subprocess.Popen([sys.executable, *words, "one", "two"], start_new_session=True, **settings))
    found, err, code = forked
    assert {key: (value, new[0][key]) for key, value in found.items() if value != new[0][key]} == {}
    assert forked == new
    assert (found["parent"], err, code) == (os.getpid(), "an error", 7)
    assert found["leads"] and found["here"] and found["said"] == "hello" and found["shown"]


def test_libraries_are_there_and_a_forked_process_may_start_threads_and_imports_onefold_itself():
    code = "import sys; before = set(sys.modules); import torch, onefold; print(*set(sys.modules) - before)"
    code += "; torch.set_num_threads(2); a = torch.ones(512, 512); print((a @ a).sum().item())"
    done = run_python("-c", code)
    imported, total = done.stdout.splitlines()
    assert total == str(512.0**3) and "onefold" in imported.split() and not {*LIBRARIES} & {*imported.split()}
    done = run_python("-c", "import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(()))")
    again = run_python("-c", "import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(()))")
    first, second = done.stdout.split(), again.stdout.split()
    assert first[:2] != second[:2] and first[2:] == second[2:], "torch begins with the same seed, others do not"


def test_an_exception_and_a_signal_end_it_as_they_end_an_interpreter():
    done = run_python("-c", "raise ValueError('mine')")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: mine\n")
    with start_python("-c", "print('runs', flush=True); import time; time.sleep(60)", stdout=subprocess.PIPE) as one:
        assert one.stdout.readline() == b"runs\n" and one.poll() is None
        os.kill(one.pid, signal.SIGTERM)
        assert one.wait(timeout=60) == -signal.SIGTERM
    deadline_s = time.monotonic() + 60
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(60)", timeout=0.2)
    assert time.monotonic() < deadline_s


def test_what_a_copy_cannot_be_is_refused():
    with pytest.raises(AssertionError, match="OMP_NUM_THREADS is read at the start: use a new interpreter"):
        run_python("-c", "", env={**os.environ, "OMP_NUM_THREADS": "3"})
    assert "-I needs a new interpreter" in run_python("-I", "-c", "").stderr
