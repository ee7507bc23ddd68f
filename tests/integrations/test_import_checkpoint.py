"""Checkpoints of DeepSpeed, DCP and torch.save come along with their optimizer state, and go out again."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import onefold
from onefold.cli.main import main
from onefold.errors import CheckpointError
from tests.harness import run_ranks
from tests.integrations.sources import SAVED, STEPS, PlainRun, build, continued, groups, train, write_deepspeed


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    return PlainRun().rest()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A file of torch.save of a plain run."""
    path = tmp_path_factory.mktemp("saved") / "last.pt"
    run = PlainRun()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "global_step": SAVED}, path)
    return path


@pytest.fixture(scope="module")
def imported(saved) -> Path:
    onefold.import_checkpoint(saved, saved.parent / "run")
    return saved.parent / "run"


FOLDERS = [(1, 2, "bf16_"), (2, 3, ""), (3, 1, ""), (3, 2, "")]  # stage, ranks, and how DeepSpeed's files begin
OTHERS = [(1, 1, ""), (1, 2, ""), (1, 3, ""), (2, 1, ""), (2, 2, ""), (3, 3, "")]


@pytest.mark.parametrize("sources", [FOLDERS, pytest.param(OTHERS, marks=pytest.mark.soak)])
def test_deepspeed_folders_of_every_stage_and_number_of_ranks_continue_as_their_run(tmp_path, wanted, sources):
    run, folders = PlainRun(), []
    for stage, ranks, prefix in sources:
        source = write_deepspeed(tmp_path / f"ds-{stage}-{ranks}{prefix}", run, stage, ranks, prefix)
        done = onefold.import_checkpoint(source, tmp_path / f"run-{stage}-{ranks}{prefix}")
        assert (done.step, done.optimizer) == (SAVED, "AdamW")
        folders.append(str(done.folder))
    assert run_ranks(2, continued, folders, 3)[0] == [wanted] * len(folders)


def test_torch_files_and_dcp_folders_continue_as_their_run(tmp_path, saved, imported, wanted):
    run = PlainRun(named=True)
    torch.save(run.model.state_dict(), tmp_path / "model.pt")
    torch.save(run.optimizer.state_dict(), tmp_path / "optimizer.pt")
    onefold.import_checkpoint(tmp_path / "model.pt", tmp_path / "two", optimizer_source=tmp_path / "optimizer.pt")
    options = StateDictOptions(flatten_optimizer_state_dict=True)  # nested: see FSDP2's folder below
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    dcp.save({"model": model, "optim": optim, "step": SAVED}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    onefold.import_checkpoint(tmp_path / "dcp", tmp_path / "flat")
    folders = [str(imported), str(tmp_path / "two"), str(tmp_path / "flat")]
    assert run_ranks(2, continued, folders, 1)[0] == [wanted] * 3


def test_what_goes_out_is_loaded_by_plain_torch_and_comes_in_again(tmp_path, imported, wanted):
    onefold.export(imported, tmp_path / "out.pt", format="torch")
    onefold.export(imported, tmp_path / "dcp", format="dcp")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    model = build()
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, optimizer, SAVED, STEPS) == wanted
    other = build()
    again = torch.optim.AdamW(groups(other), lr=0.5)
    parts = dict(zip(("model", "optim"), get_state_dict(other, again), strict=True))
    dcp.load(parts, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, again, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    assert train(other, again, SAVED, STEPS) == wanted
    folders = []
    for source in ("out.pt", "dcp"):
        folders.append(
            str(onefold.import_checkpoint(tmp_path / source, tmp_path / f"from-{source}", step=SAVED).folder)
        )
    assert run_ranks(1, continued, folders, 2)[0] == [wanted] * 2


def fsdp_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = fully_shard(build())
    return model, torch.optim.AdamW(groups(model), lr=1e-2)


def both_ways(folder: str) -> list[list[float]]:
    """On a rank: the rest of a run of FSDP2; of Onefold from FSDP2's folder; of FSDP2 again from Onefold's folder."""
    onefold.init()
    first, optimizer = fsdp_run()
    train(first, optimizer, 0, SAVED)
    state = dict(zip(("model", "optim"), get_state_dict(first, optimizer), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/fsdp")
    if dist.get_rank() == 0:
        onefold.import_checkpoint(f"{folder}/fsdp", f"{folder}/run", step=SAVED)
        onefold.export(f"{folder}/run", f"{folder}/dcp", format="dcp")
    dist.barrier()
    second, again = fsdp_run()
    parts = dict(zip(("model", "optim"), get_state_dict(second, again), strict=True))
    dcp.load(parts, checkpoint_id=f"{folder}/dcp")
    set_state_dict(second, again, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    runs = (first, optimizer), (second, again)
    return [train(*run, SAVED, STEPS) for run in runs] + continued([f"{folder}/run"], 3)


def test_two_ranks_of_fsdp2_and_of_onefold_continue_each_others_run(tmp_path, wanted):
    for found in run_ranks(2, both_ways, str(tmp_path)):
        assert found == [wanted] * 3  # every rank has the same batches


class Malice:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


@pytest.mark.parametrize("kind", ["torch", "old torch", "dcp"])
def test_a_malicious_file_does_nothing_and_is_refused_in_one_line(tmp_path, kind, capfd):
    made = tmp_path / "made"
    value = {"model": {"w": torch.ones(2)}, "optimizer": Malice(made)}
    if kind == "dcp":
        source = tmp_path / "folder"
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps(value["optimizer"]))
    else:
        source = tmp_path / "bad.pt"
        torch.save(value, source, _use_new_zipfile_serialization=kind == "torch")
    code = main(["import-checkpoint", str(source), str(tmp_path / "run")])
    said = capfd.readouterr().err
    assert code == 2 and len(said.splitlines()) == 1 and "io.open" in said and str(source) in said, said
    assert not made.exists() and not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".importing*"))


TRIES = """
import os, socket, subprocess
from onefold.integrations.checkpoints.sandbox import enter
mine = os.open({mine!r}, os.O_RDWR | os.O_CREAT)
assert enter(1000) == {measures!r}
for what in (
    socket.socket, lambda: subprocess.run(["true"]), lambda: open({new!r}, "w"), lambda: open({mine!r}, "a"),
    lambda: os.unlink({mine!r}), lambda: os.mkdir({new!r}), lambda: os.kill(os.getppid(), 0),
):
    try:
        what()
        raise SystemExit(3)
    except PermissionError:
        pass
try:
    bytearray(16 << 30)
    raise SystemExit(4)
except MemoryError:
    pass
os.write(mine, b"tensors")
"""


def test_the_process_that_reads_pickle_can_write_only_what_it_was_given(tmp_path):
    measures = ["limits", *(["user"] if os.geteuid() == 0 else []), "system calls"]
    mine, new = str(tmp_path / "mine"), str(tmp_path / "new")
    text = TRIES.format(mine=mine, new=new, measures=measures)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine").read_bytes() == b"tensors" and not (tmp_path / "new").exists()


def test_folders_that_lack_something_are_refused(tmp_path):
    folder = write_deepspeed(tmp_path / "ds", PlainRun(), 2, 3)
    first, last = (folder / f"global_step{SAVED}" / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (1, 2))
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_2.*was cut short"):
        onefold.import_checkpoint(folder, tmp_path / "run")
    last.unlink()
    with pytest.raises(CheckpointError, match=r"was written by 3 ranks and has 2 files"):
        onefold.import_checkpoint(folder, tmp_path / "run")
    last.write_bytes(whole)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"has no zero_pp_rank_1_mp_rank_00_optim_states\.pt"):
        onefold.import_checkpoint(folder, tmp_path / "run")
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest names '\.\./elsewhere', which is no folder beside it"):
        onefold.import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_told_is_asked_for(tmp_path, saved):
    norm = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(norm.parameters())
    norm(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": norm.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "norm.pt")
    with pytest.raises(CheckpointError, match=r"2 parameters match the model's 4 tensors in 6 ways.*--names"):
        onefold.import_checkpoint(tmp_path / "norm.pt", tmp_path / "run")
    assert onefold.import_checkpoint(tmp_path / "norm.pt", tmp_path / "run", names=["weight", "bias"]).parameters == 5
    state = optimizer.state_dict()
    state["param_groups"][0]["trust_ratio"] = 1.0
    torch.save({"model": norm.state_dict(), "optimizer": state}, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match="is of no class that Onefold knows; name the torch class"):
        onefold.import_checkpoint(tmp_path / "odd.pt", tmp_path / "odd", names=["weight", "bias"])


def load_into_another(folder: str) -> str:
    onefold.init()
    model = onefold.shard(nn.Linear(3, 3), stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW)
    with pytest.raises(CheckpointError) as error:
        onefold.load(folder, model, optimizer)
    return str(error.value)


def test_another_model_is_refused_by_name(imported):
    assert "missing in the checkpoint: bias, weight; not in the model: a.bias" in run_ranks(
        1, load_into_another, str(imported)
    )[0].replace(" and ", ", ")
