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
    [("raise", "rank 1 ended with exit code 1; what it said stands above"), ("leave", "rank 1 ended with exit code 3")],
)
def test_the_first_to_fail_is_named(tmp_path, script, what, said):
    code, err = ran(tmp_path, script, what)
    assert code == 1 and err.splitlines()[-1].startswith(f"onefold: {said}"), err


def test_a_lost_rank_starts_again_with_all_others(tmp_path, script):
    code, err = ran(tmp_path, script, "kill", "--max-restarts", "1")
    assert code == 0 and "a rank was lost (rank 1 was killed by SIGKILL); start 1 of 1" in err, err
    assert (tmp_path / "rank1.start1").read_text().startswith("2 ")


def test_a_signal_reaches_every_rank(tmp_path, script):
    with launched(tmp_path / "deep", "--ranks", "2", str(script), str(tmp_path), "wait", command="run") as launch:
        launch.wait_for(lambda: all((tmp_path / f"waits{rank}").exists() for rank in (0, 1)), "both ranks")
        os.kill(launch.process.pid, signal.SIGTERM)
        code, _, err = launch.end()
        assert launch.gone()
    assert (code, err) == (0, "")
    assert all((tmp_path / f"heard{rank}").exists() for rank in (0, 1))


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
