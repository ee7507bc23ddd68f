"""A mistake is one line that says what to do, an exit code, and no process left."""

import resource
from pathlib import Path

import pytest

from onefold.cli.main import main
from onefold.train.run.settings import Settings
from onefold.train.run.start import check_folder
from tests.harness import fresh_ranks
from tests.train.launched import SMALL, run
from tests.train.pooled import one_rank, settings_of
from tests.train.written import write_run


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
        (("--model", "1t"), "stage 3 does not fit: the plan for 1,"),
        (("--model", "1t"), "or --no-plan to try it all the same"),
        (("--layers", "999999"), "is not a positive whole number up to 10,000"),
        (("--micro-batch", "1" + "0" * 30), "use a number of at most 1,000,000"),
        (("--steps", "1" + "0" * 30), "use a number of at most 9,007,199,254,740,992"),
        (("--seed", "1" + "0" * 30), "use a number of at most"),
        (("--timeout-s", "1e300"), "--timeout-s 1e+300 is out of range; use a number of seconds up to 2592000"),
    ],
)
def test_a_mistake_is_found_before_any_rank_starts(tmp_path, capsys, flags, said):
    assert main(["train", "--out", str(tmp_path / "run"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in said_once(err)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    assert main(["train", "--out", str(tmp_path / "run")]) == 2
    assert said_once(capsys.readouterr().err).endswith("resume its run with --resume, or give another --out")


def test_a_folder_for_state_on_disk_that_is_not_there_is_found_before_any_rank_starts(tmp_path, capsys):
    gone = str(tmp_path / "gone")
    flags = ("--offload", "disk", "--offload-path", gone)
    for command in (("train", "--out", str(tmp_path / "run")), ("verify", "--model", "gpt-tiny")):
        assert main([*command, *flags]) == 2
        assert f"{gone}, does not exist; give a folder" in said_once(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_what_another_rank_tries_in_an_empty_folder_is_nothing_in_it(tmp_path):
    (tmp_path / ".writing-123").touch()
    check_folder(settings_of(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".writing-123"]


def test_a_validation_loss_that_is_not_a_number_ends_all_ranks(tmp_path):
    settings = settings_of(tmp_path / "run", steps={"steps": 1}, adam={"lr": 1e38, "min_lr": 1e38, "warmup": 0})
    for outcome in fresh_ranks(2, one_rank, settings, timeout_s=120):
        assert "step 1: the validation loss is nan; lower --lr" in outcome.error


def test_a_run_repeated_in_its_own_folder_is_told_to_take_another(tmp_path, capsys):
    write_run(tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "run")]) == 2
    assert f"give another --out (and --config {config}, to repeat that run)" in said_once(capsys.readouterr().err)


def test_a_loss_that_is_not_a_number_ends_all_ranks_with_the_step_and_the_way_out(tmp_path):
    code, _, err = run(
        tmp_path / "run", *SMALL, "--lr", "1e30", "--warmup", "0", "--steps", "50", "--max-restarts", "3"
    )
    assert code == 1
    line = said_once(err)
    assert "step " in line and "first in unit" in line and "Lower --lr" in line


def with_little_memory(settings: Settings) -> None:
    """On a rank: all it holds already, and half a gigabyte."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), used + (1 << 29)))
    one_rank(settings)


def test_memory_that_runs_out_names_what_grew_and_the_way_out(tmp_path):
    large = {"layers": 1, "hidden": 256, "heads": 1, "seq": 256}
    settings = settings_of(tmp_path / "run", model=large, steps={"steps": 3, "micro_batch": 256})
    for outcome in fresh_ranks(2, with_little_memory, settings, timeout_s=120):
        assert "out of memory in forward and backward, where activations grew" in outcome.error
        assert "halve --micro-batch 256 and double --accumulation" in outcome.error
