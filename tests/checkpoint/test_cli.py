"""`onefold export`, `inspect`, `verify-checkpoint`: what they say, as a table and as JSON, and how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from onefold.checkpoint.format.storage import Storage
from onefold.cli.main import main
from tests.checkpoint.drive import expected, save


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (1, 2):
        save(Storage(), tmp_path / "run", step)
    return tmp_path / "run"


def test_inspect_tells_the_newest_checkpoint_and_every_tensor(run, capsys):
    assert main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step 2, 3 ranks" in said and "committed: 1, 2" in said
    row = next(line for line in said.splitlines() if line.startswith("│ w"))
    assert "60×2" in row and "value F32, exp_avg F32" in row and "960 bytes" in row


def test_inspect_in_a_pipe_has_one_line_for_each_tensor_with_its_whole_name(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["inspect", str(run), "--json"]) == 0
    names = {tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    assert main(["inspect", str(run)]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert {row[1].strip() for row in rows} >= names


LONG = "model.layers.31.self_attention.query_key_value_projection.weight"


@pytest.mark.parametrize("terminal", [False, True])
def test_inspect_cuts_no_name_that_is_longer_than_the_screen(tmp_path, capsys, monkeypatch, terminal):
    save(Storage(), tmp_path, 1, name=LONG)
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")  # no escapes
    assert main(["inspect", str(tmp_path)]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "┏┃┡│└"]
    shown = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert "".join(shown) == LONG and (len(shown) > 1) == (max(map(len, table)) <= 80) == terminal


def test_inspect_as_json_is_all_json(run, capsys):
    assert main(["inspect", str(run / "step-00000001"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["ranks"], said["committed_steps"], said["extra"]) == (1, 3, [1], {"step": 1})
    assert said["bytes_by_state"] == {"trained value": 480, "optimizer exp_avg": 480}
    assert [tensor["name"] for tensor in said["tensors"]] == ["w"]


def test_verify_exits_0_on_whole_checkpoints_and_1_on_damage_which_it_names(run, capsys):
    assert main(["verify-checkpoint", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok       {run / f'step-0000000{step}'}" for step in (2, 1)]
    file = run / "step-00000001" / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert main(["verify-checkpoint", str(run)]) == 1
    said = capsys.readouterr().out
    assert f"ok       {run / 'step-00000002'}" in said and f"DAMAGED  {file}: tensor w|exp_avg|80-120" in said
    assert main(["verify-checkpoint", str(run), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [damage["tensor"] for damage in said[str(file.parent)]] == ["w"] and said[str(run / "step-00000002")] == []


def test_export_writes_the_folder_and_says_so(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(tmp_path / "out"), "step": 2, "files": ["model.safetensors"], "tensors": 1, "bytes": 240,
    }  # fmt: skip
    read = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["w"], expected(2, "value").reshape(60, 2).bfloat16())


@pytest.mark.parametrize("command", [["export", "{}", "{}/out"], ["inspect", "{}"], ["verify-checkpoint", "{}"]])
def test_a_users_mistake_is_one_line_and_exit_code_2(command, tmp_path, capsys):
    assert main([part.format(tmp_path) for part in command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"onefold: {tmp_path} holds no committed checkpoint") and said.count("\n") == 1


# -- the folder that `onefold train` made ------------------------------------------------------------------------------


@pytest.fixture
def out(run, tmp_path) -> Path:
    """A run's --out: its checkpoints are one folder further in, beside what else it wrote."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").touch()
    return run.rename(tmp_path / "out" / "checkpoints").parent


def test_export_takes_the_folder_of_a_training(out, tmp_path, capsys):
    assert main(["export", str(out), str(tmp_path / "weights")]) == 0
    assert capsys.readouterr().out.startswith("step 2: 1 tensor")
    read = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    assert torch.equal(read["w"], expected(2, "value").reshape(60, 2))


def test_inspect_takes_the_folder_of_a_training(out, capsys):
    assert main(["inspect", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(out / "checkpoints" / "step-00000002") and said["committed_steps"] == [1, 2]


def test_verify_takes_the_folder_of_a_training(out, capsys):
    assert main(["verify-checkpoint", str(out)]) == 0
    steps = [out / "checkpoints" / f"step-0000000{step}" for step in (2, 1)]
    assert capsys.readouterr().out.splitlines() == [f"ok       {step}" for step in steps]


def test_checkpoints_in_the_folder_itself_come_before_those_of_a_training_in_it(out, capsys):
    save(Storage(), out, 7)
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["committed_steps"] == [7]


def test_a_training_without_a_checkpoint_is_named_with_the_folder_that_lacks_it(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"{tmp_path / 'checkpoints'} holds no committed checkpoint" in capsys.readouterr().err
