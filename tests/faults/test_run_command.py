"""`onefold run`: a user's script on local ranks. Its own flags reach it, its ends are told, nothing is left running."""

import os
import signal
from pathlib import Path

import pytest

from onefold.cli.main import main
from tests.train.launched import launched, run

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, onefold
where, what = Path(sys.argv[1]), sys.argv[2]
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
onefold.init(timeout_s=30)
total = torch.ones(1)
torch.distributed.all_reduce(total)
(where / f"rank{rank}.start{start}").write_text(f"{int(total)} {sys.argv[3:]}")
if what == "raise" and rank == "1":
    raise KeyError("mine")
if what == "kill" and rank == "1" and start == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "leave" and rank == "1":
    sys.exit(3)
if what == "leave children":
    os.system("setsid sleep 60 &")
if what == "save late":
    def late(*_):
        deadline = time.monotonic() + 2 * (rank == "0")
        while time.monotonic() < deadline:
            pass
        (where / f"heard{rank}").touch()
        os._exit(143)
    signal.signal(signal.SIGTERM, late)
if what in ("save late", "no handler"):
    (where / f"waits{rank}").touch()
    while True:
        time.sleep(0.05)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit((where / f"heard{rank}").touch()))
    (where / f"waits{rank}").touch()
    while True:
        time.sleep(0.05)
torch.distributed.barrier()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def ran(tmp_path: Path, script: Path, what: str, *flags: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
    words = ("--ranks", "2", *flags, str(script), str(tmp_path), what, *more)
    code, _, err = run(tmp_path / "deep", *words, command="run")
    return code, err


def test_a_script_gets_its_own_flags_and_ranks_that_meet(tmp_path, script):
    assert ran(tmp_path, script, "end", more=("--ranks", "7", "--help")) == (0, "")
    found = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert found == {f"rank{rank}.start0": "2 ['--ranks', '7', '--help']" for rank in (0, 1)}


@pytest.mark.parametrize(
    ("what", "said"),
    [("raise", "rank 1 ended with exit code 1; see its output above"), ("leave", "rank 1 ended with exit code 3")],
)
def test_the_first_to_fail_is_named(tmp_path, script, what, said):
    code, err = ran(tmp_path, script, what)
    assert code == 1 and err.splitlines()[-1].startswith(f"onefold: {said}"), err


def test_a_lost_rank_starts_again_with_all_others(tmp_path, script):
    code, err = ran(tmp_path, script, "kill", "--max-restarts", "1")
    assert code == 0 and "a rank was lost (rank 1 was killed by SIGKILL); restart 1 of 1" in err, err
    assert (tmp_path / "rank1.start1").read_text().startswith("2 ")


@pytest.mark.parametrize(
    ("what", "said", "heard"),
    [("wait", (0, ""), True), ("save late", (143, "onefold: ended by SIGTERM\n"), True),
     ("no handler", (143, "onefold: ended by SIGTERM\n"), False)],
)  # fmt: skip
def test_a_signal_reaches_every_rank_and_each_ends_in_its_own_time(tmp_path, script, what, said, heard):
    with launched(tmp_path / "deep", "--ranks", "2", str(script), str(tmp_path), what, command="run") as launch:
        launch.wait_for(lambda: all((tmp_path / f"waits{rank}").exists() for rank in (0, 1)), "both ranks")
        os.kill(launch.process.pid, signal.SIGTERM)
        code, _, err = launch.end()
        assert launch.gone()
    assert (code, err) == said
    assert all((tmp_path / f"heard{rank}").exists() == heard for rank in (0, 1))


def test_a_process_that_a_script_left_behind_does_not_hold_the_launcher(tmp_path, script):
    """One in a session of its own: a daemon, which its script wanted to live on."""
    words = ("--ranks", "2", str(script), str(tmp_path), "leave children")
    with launched(tmp_path / "deep", *words, command="run") as launch:
        launch.process.wait(timeout=40)
        left = launch.pids()
    assert launch.process.returncode == 0 and len(left) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script was given"),
        (["nowhere.py"], "nowhere.py is no file"),
        (["--ranks", "0", __file__], "--ranks 0 is out of range"),
        (["--timeout-s", "-1", __file__], "--timeout-s -1 is out of range"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["run", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith(f"onefold: {said}"), err
