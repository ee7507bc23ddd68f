"""A run folder has one run at a time; a lock ends with its holder, and nobody takes a living one's."""

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from onefold.cli.main import main
from onefold.errors import ConfigError
from onefold.train.run.lock import RunLock, lock_by_existence
from tests.harness import run_ranks_raises
from tests.harness.python import start_python
from tests.train.launched import SMALL, launched
from tests.train.pooled import one_rank, settings_of

HOLDER = """
import sys
from pathlib import Path
from onefold.train.run.lock import RunLock, lock_by_existence
out = Path(sys.argv[2])
if sys.argv[1] == "flock":
    RunLock(out).__enter__()
else:
    lock_by_existence(out)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["flock", "name"])
def holder(request, tmp_path):
    """A process that holds tmp_path, by the kernel's lock or by the file alone."""
    pipe = subprocess.PIPE
    process = start_python("-c", HOLDER, request.param, str(tmp_path), stdin=pipe, stdout=pipe)
    try:
        assert process.stdout.readline() == b"held\n"
        yield request.param, process
    finally:
        process.kill()
        process.communicate()


def hold(kind: str, out: Path) -> None:
    if kind == "flock":
        with RunLock(out):
            pass
    else:
        os.close(lock_by_existence(out))


def test_a_second_holder_is_told_who_is_the_first_and_takes_over_once_that_was_killed(holder, tmp_path):
    kind, process = holder
    with pytest.raises(ConfigError) as error:
        hold(kind, tmp_path)
    said = str(error.value)
    assert said.startswith(f"--out {tmp_path} is in use by process {process.pid} on host {socket.gethostname()} since ")
    assert said.endswith("; wait for it, or give another --out")
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".lock").exists()
    hold(kind, tmp_path)


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path):
    about = {"host": socket.gethostname(), "pid": os.getpid(), "started": "1 of another boot"}
    (tmp_path / ".lock").write_text(json.dumps(about))
    os.close(lock_by_existence(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_file_of_another_host_is_left_alone_where_only_the_file_tells(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "today"}))
    with pytest.raises(ConfigError, match=r"on host elsewhere since today; .*\(if it is gone: remove .*\.lock\)"):
        lock_by_existence(tmp_path)


def test_nothing_is_left_of_a_lock_that_was_let_go(tmp_path):
    with RunLock(tmp_path / "new"):
        assert (tmp_path / "new" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with RunLock(tmp_path / "old"):
        (tmp_path / "old" / "result").touch()
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["result"]


def test_many_that_come_and_go_never_hold_it_together(tmp_path):
    inside, most, seen = [0], [0], [0]
    guard = threading.Lock()

    def come_and_go():
        for _ in range(300):
            try:
                with RunLock(tmp_path):
                    with guard:
                        inside[0] += 1
                        most[0], seen[0] = max(most[0], inside[0]), seen[0] + 1
                    with guard:
                        inside[0] -= 1
            except ConfigError:
                continue

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and seen[0] > 0


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ("--ranks", "1", *SMALL, "--data", __file__, "--save-every", "0")
    with launched(out, *flags, "--steps", "100000") as first:
        first.wait_for(lambda: first.steps() >= 1)
        for again in ((), ("--resume",)):
            assert main(["train", "--out", str(out), *again, *flags, "--steps", "100000"]) == 2
            err = capsys.readouterr().err
            assert f"--out {out} is in use by process {first.process.pid} on host" in err and err.count("\n") == 1
        first.process.terminate()
        assert first.end()[0] == 0
    assert not (out / ".lock").exists() and (out / "facts.json").exists()


def test_ranks_without_a_launcher_hold_the_folder_and_all_say_who_has_it(tmp_path):
    with RunLock(tmp_path):
        for caught in run_ranks_raises(2, one_rank, settings_of(tmp_path)):
            assert f"--out {tmp_path} is in use by process {os.getpid()}" in caught.message


def test_a_folder_on_a_file_system_without_locks_is_held_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr("onefold.train.run.lock.has_locks", lambda _: False)  # none is mounted here
    for _ in range(2):
        with RunLock(tmp_path / "run"), pytest.raises(ConfigError, match="in use by process"):
            RunLock(tmp_path / "run").__enter__()
    assert not (tmp_path / "run" / ".lock").exists()
