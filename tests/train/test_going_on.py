"""What --resume keeps, refuses and says; what it is told stays told."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from onefold.cli.train import TrainCommand
from onefold.errors import ConfigError, OnefoldError
from onefold.train.run.data import prepare
from onefold.train.run.folder import append_lines
from onefold.train.run.groups import DataSettings
from onefold.train.run.records import read_facts, read_metrics, read_warnings
from onefold.train.run.settings import Settings
from onefold.train.run.start import check_folder
from onefold.train.run.toml import read_toml, to_toml, with_values
from tests.harness import run_ranks, run_ranks_raises
from tests.train.pooled import one_rank, settings_of, trained


def resumed(out, **changes):
    """As the command line does it: the run's own settings, and changes."""
    saved = with_values(Settings(), read_toml(out / "config.toml"), "file")
    groups = {"output": {"out": str(out)}, "checkpoints": {"resume": True}, **changes}
    return with_values(saved, groups, "test")


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of two ranks at step 4, with all its checkpoints."""
    out = tmp_path_factory.mktemp("going-on") / "run"
    trained(2, out, steps={"steps": 4}, checkpoints={"save_every": 1, "keep": 0})
    return out


@pytest.fixture
def out(begun, tmp_path) -> Path:
    """The same run in a folder of its own, for a test to go on with."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


def test_on_other_ranks_a_run_goes_on_with_the_same_global_batch(out):
    before = read_facts(out)["global_batch"]
    run_ranks(1, one_rank, resumed(out, steps={"steps": 6}))
    after = read_facts(out)
    assert (after["global_batch"], after["ranks"], after["accumulation"]) == (before, 1, 2)


@pytest.mark.parametrize("clip", [pytest.param(1.0, marks=pytest.mark.soak), 0.0])  # after backward, and inside it
def test_an_offloaded_run_goes_on_with_and_without_offload_to_the_same_losses(clip, tmp_path):
    plain, moved, back = (tmp_path / name for name in ("plain", "moved", "back"))
    for out, tier in ((plain, None), (moved, "host")):
        trained(2, out, steps={"steps": 4}, adam={"clip": clip, "warmup": 3}, zero={"offload": tier})
    shutil.copytree(moved, back)
    first = read_metrics(moved)[-1]
    assert first["memory"]["optimizer"] == 0 < first["memory"]["host"]
    assert (first["grad_norm"] is None) == (clip == 0)
    for out, tier in ((plain, None), (moved, "host"), (back, None)):
        run_ranks(2, one_rank, resumed(out, steps={"steps": 6}, zero={"offload": tier}))
    losses = [[row["loss"] for row in read_metrics(out)] for out in (plain, moved, back)]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 6


def test_every_checkpoint_stays_if_asked(begun):
    assert len(list((begun / "checkpoints").glob("step-*"))) == 4


def test_a_run_that_is_past_the_wanted_step_says_so(out):
    for caught in run_ranks_raises(2, one_rank, resumed(out, steps={"steps": 3})):
        assert "is at step 4 already; give --steps above that" in caught.message
    assert len(read_metrics(out)) == 4


def test_rows_without_a_checkpoint_are_set_aside_not_lost(out, tmp_path):
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    before = (out / "metrics.jsonl").read_text()
    run_ranks(2, one_rank, resumed(out))
    assert (out / "metrics-without-checkpoint.jsonl").read_text() == before
    assert any("no checkpoint to resume from" in row["message"] for row in read_warnings(out))


def test_the_baseline_is_of_the_windows_that_are_evaluated(out):
    before = read_facts(out)["baseline"]
    run_ranks(2, one_rank, resumed(out, steps={"steps": 5, "eval_windows": 9}))
    assert read_facts(out)["baseline"] != before


def test_metrics_are_json_also_where_a_norm_is_infinite(tmp_path):
    out = tmp_path / "run"
    trained(2, out, zero={"precision": "fp16"}, steps={"steps": 3})

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("given", "flag", "gone"),
    [
        ("accumulation = 2", ["--global-batch", "8"], "accumulation"),
        ("global_batch = 8", ["--accumulation=2"], "global_batch"),
    ],
)
def test_a_flag_for_one_wins_over_a_file_for_the_other(given, flag, gone, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(f"[steps]\n{given}\n")
    assert getattr(TrainCommand.defaults(["--config", str(path), *flag]).steps, gone) is None


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_folder(settings_of(tmp_path / "file" / "run"))
    with pytest.raises(OnefoldError, match="cannot be written"):
        append_lines(tmp_path / "file" / "metrics.jsonl", [{}])


@pytest.mark.parametrize(
    ("values", "beside", "said"),
    [
        ([1, 2, -1, 4], {"dtype": "int64"}, "token -1 at place 2"),
        ([1, 2, 30], {"dtype": "uint16", "vocab": 10}, "token 30"),
    ],
)
def test_tokens_outside_the_vocabulary_are_found_before_training(values, beside, said, tmp_path):
    dtype = {"int64": torch.int64, "uint16": torch.uint16}[beside["dtype"]]
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(torch.tensor(values).to(dtype).view(torch.uint8).tolist()))
    (tmp_path / "tokens.bin.json").write_text(json.dumps(beside))
    with pytest.raises(ConfigError, match=said):
        prepare(DataSettings(data=path))


def test_every_setting_survives_the_file(tmp_path):
    settings = with_values(Settings(), {"checkpoints": {"keep": 0}, "steps": {"eval_every": 0}}, "test")
    text = to_toml(settings)
    path = tmp_path / "settings.toml"
    path.write_text(text)
    assert with_values(Settings(), read_toml(path), "file") == settings
