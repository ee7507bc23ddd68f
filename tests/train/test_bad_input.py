"""A mistake is one line that says what to do, an exit code, and no process left."""

import pytest

from tests.train.launched import SMALL, run


def said_once(err: str) -> str:
    """The one line of a failed launch."""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("onefold: ")
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--data", "/no/such/folder"), "is not there; give a text file, a folder"),
        (("--global-batch", "9"), "batches that are: 8, 16"),
        (("--stage", "7"), "use one of 0, 1, 2, 3 or 'auto'"),
    ],
)
def test_a_mistake_is_found_before_any_rank_starts(tmp_path, flags, said):
    code, out, err = run(tmp_path / "run", *flags)
    assert code == 2 and out == ""
    assert said in said_once(err)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    code, _, err = run(tmp_path / "run")
    assert code == 2 and "--resume" in said_once(err)


def test_a_loss_that_is_not_a_number_ends_all_ranks_with_the_step_and_the_way_out(tmp_path):
    code, _, err = run(
        tmp_path / "run", *SMALL, "--lr", "1e30", "--warmup", "0", "--steps", "50", "--max-restarts", "3"
    )
    assert code == 1
    line = said_once(err)
    assert "step " in line and "first in unit" in line and "Lower --lr" in line


def test_memory_that_runs_out_names_what_grew_and_the_way_out(tmp_path):
    large = ("--layers", "1", "--hidden", "1024", "--heads", "1", "--seq", "1024", "--micro-batch", "256")
    code, _, err = run(tmp_path / "run", *large, "--steps", "3", limit="ulimit -v 4500000")
    assert code == 1
    line = said_once(err)
    assert "out of memory in forward and backward, where activations grew" in line
    assert "halve --micro-batch 256 and double --accumulation" in line
