"""`onefold run`: a user's script on local ranks. Its own flags reach it, its ends are told, nothing is left running."""

import os
import signal
from pathlib import Path

import pytest

from onefold.cli.main import main
from tests.harness.patience import PATIENCE_S
from tests.security.reached import CAN_ENTER, ENTER, attack, listeners, outside_loopback
from tests.train.launched import launched

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
where, what = Path(sys.argv[1]), sys.argv[2]
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if what != "late and not handled":  # of which nothing but its end is asked
    import torch, onefold
    onefold.init(timeout_s=30)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    (where / f"rank{rank}.start{start}").write_text(f"{int(total)} {sys.argv[3:]}")
if what == "kill, then raise" and rank == "1" and start == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "kill, then raise" and start == "1":
    subprocess.Popen(["sleep", "60"], start_new_session=True)  # a daemon, which its script wants to live on
    torch.distributed.barrier()  # both have one
    if rank == "1":
        raise KeyError("mine")
def ends(code, after_s=0.0):
    def heard(*_):
        time.sleep(after_s)
        (where / f"heard{rank}").touch()
        os._exit(code)
    return heard
if what == "handled":
    signal.signal(signal.SIGTERM, ends(0))
if what == "late and not handled" and rank == "0":
    signal.signal(signal.SIGTERM, ends(143, 2.0))
if what in ("handled", "late and not handled"):
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


def test_a_script_gets_its_flags_starts_again_after_a_lost_rank_and_may_leave_daemons_behind(tmp_path, script):
    """All ranks start again, without the one that was lost; then rank 1 raises, which ends the run with its error."""
    words = ("--elastic", "1:3", str(script), str(tmp_path), "kill, then raise")
    with launched(tmp_path / "deep", *words, "--ranks", "7", "--help", command="run") as launch:
        launch.process.wait(timeout=PATIENCE_S)  # and not for the daemons
        left = launch.pids()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        _, _, err = launch.end()
    assert launch.process.returncode == 1 and len(left) == 2
    again, last = (line for line in err.splitlines() if line.startswith("onefold: "))
    assert "a rank was lost (rank 1 was killed by SIGKILL); going on with 2 of 3 ranks" in again
    assert last == "onefold: rank 1: KeyError: 'mine'" and "Traceback" in err  # it was not lost: no third start
    found = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    starts = [(0, 3), (1, 2)]
    assert found == {f"rank{rank}.start{i}": f"{n} ['--ranks', '7', '--help']" for i, n in starts for rank in range(n)}


@pytest.mark.parametrize(
    ("what", "said", "heard"),
    [("handled", (0, ""), {0, 1}), ("late and not handled", (143, "onefold: ended by SIGTERM\n"), {0})],
)
def test_a_signal_reaches_every_rank_and_each_ends_in_its_own_time(tmp_path, script, what, said, heard):
    """Before the signal, where a test may make network namespaces: only loopback is listened on, and another user who
    speaks to its ports gets nothing."""
    limit = ENTER if CAN_ENTER and what == "handled" else ""
    words = ("--ranks", "2", str(script), str(tmp_path), what)
    with launched(tmp_path / "deep", *words, command="run", limit=limit) as launch:
        launch.wait_for(lambda: all((tmp_path / f"waits{rank}").exists() for rank in (0, 1)), "both ranks")
        if limit:
            found = listeners(launch.process.pid)
            assert found and outside_loopback(found) == set()
            assert attack(launch, tmp_path) > 0
            assert launch.process.poll() is None
        os.kill(launch.process.pid, signal.SIGTERM)
        code, _, err = launch.end()
        assert launch.gone()
    assert (code, err) == said
    assert {rank for rank in (0, 1) if (tmp_path / f"heard{rank}").exists()} == heard


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script was given"),
        (["nowhere.py"], "nowhere.py is no file"),
        (["--ranks", "0", __file__], "--ranks 0 is out of range"),
        (["--ranks", "99999999999", __file__], "--ranks 99999999999 is out of range; use a number of at most"),
        (
            ["--elastic", "1:99999999999", __file__],
            "--elastic '1:99999999999' is out of range; use at most 1,048,576 ranks",
        ),
        (["--elastic", "2", __file__], "--elastic '2' is not MIN:MAX ranks"),
        (["--elastic", "2:3", "--ranks", "4", __file__], "--ranks 4 is not within --elastic 2:3"),
        (["--timeout-s", "-1", __file__], "--timeout-s -1 is out of range"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["run", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith(f"onefold: {said}"), err
