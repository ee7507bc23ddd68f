"""Saving the same step again, all or nothing under a kill at any operation; and saving adapters only."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol.save import save_on
from tests.harness import fresh_ranks, run_ranks
from tests.models import Stack, blocks

DIM, RANKS = 8, 2


def built(stage: int = 2) -> tuple[Stack, onefold.Optimizer]:
    torch.manual_seed(5)
    model = onefold.shard(Stack(blocks(2, DIM)), stage=stage)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    model(torch.ones(2, DIM)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bias(model: Stack) -> Tensor:
    return model.layers[0].up.bias.detach().clone()


def saved_again(folder: str) -> None:
    model, optimizer = built()
    first = onefold.save(folder, model, optimizer, step=3)
    before = {path.name: path.stat().st_ino for path in first.iterdir()}
    with pytest.raises(onefold.CheckpointError, match="overwrite=True"):
        onefold.save(folder, model, optimizer, step=3)
    with pytest.raises(onefold.CheckpointError, match="stand behind"):
        onefold.save(folder, model, optimizer, step=2, overwrite=True)
    assert onefold.save(folder, model, optimizer, step=3, overwrite=True) == first  # the same: nothing is written
    torch.distributed.barrier()
    assert {path.name: path.stat().st_ino for path in first.iterdir()} == before
    assert sorted(os.listdir(folder)) == [first.name]
    train(model, optimizer)
    for number, wait in enumerate((True, False)):
        wanted = bias(model)
        assert onefold.save(folder, model, optimizer, extra=number, step=3, overwrite=True, wait=wait) == first
        onefold.finish_saves()
        train(model, optimizer)
        assert onefold.load(folder, model, optimizer) == number
        assert torch.equal(bias(model), wanted)
        assert sorted(os.listdir(folder)) == [first.name]
    onefold.save(folder, model, optimizer, step=4, overwrite=True)
    for mistake in (dict(overwrite="yes"), dict(only="adapters")):
        with pytest.raises(onefold.ConfigError):
            onefold.save(folder, model, optimizer, step=5, **mistake)


def test_the_same_step_is_replaced_with_overwrite_and_an_identical_one_stays(tmp_path: Path) -> None:
    run_ranks(RANKS, saved_again, str(tmp_path / "run"))


class Failing(Storage):
    """Cannot give the new checkpoint its name."""

    def rename(self, old: Path, new: Path) -> None:
        if old.name.startswith(".writing-") and new.name.startswith("step-"):
            raise onefold.CheckpointError("the disk is gone for a moment")
        super().rename(old, new)


def failed_replacement(folder: str) -> None:
    model, optimizer = built()
    onefold.save(folder, model, optimizer, extra="old", step=3)
    train(model, optimizer)
    with pytest.raises(onefold.CheckpointError, match="gone for a moment"):
        save_on(Failing(), folder, model, optimizer, extra="new", step=3, overwrite=True)
    assert onefold.load(folder, model, optimizer) == "old"
    torch.distributed.barrier()
    assert os.listdir(folder) == ["step-00000003"]


def test_a_replacement_that_fails_leaves_the_old_checkpoint_in_its_place(tmp_path: Path) -> None:
    run_ranks(RANKS, failed_replacement, str(tmp_path / "run"))


class Dying(Storage):
    """Ends the process before its n-th change of names."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count()
        super().remove_folder(path)


def replace_and_die(folder: str, left: int) -> None:
    model, optimizer = built()
    train(model, optimizer)
    save_on(Dying(left), folder, model, optimizer, extra="new", step=3, overwrite=True)


def save_first(folder: str) -> list[Tensor]:
    model, optimizer = built()
    onefold.save(folder, model, optimizer, extra="old", step=3)
    old = bias(model)
    train(model, optimizer)
    return [old, bias(model)]


def look(folder: str, wanted: list[Tensor]) -> str:
    """Whichever is there is whole; and saving goes on."""
    model, optimizer = built()
    extra: Any = onefold.load(folder, model, optimizer)
    assert torch.equal(bias(model), wanted[extra == "new"])
    onefold.save(folder, model, optimizer, extra=extra, step=3, overwrite=True)
    assert onefold.load(folder, model, optimizer) == extra
    assert os.listdir(folder) == ["step-00000003"]
    return extra


def test_a_save_killed_at_any_change_of_names_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    seen = []
    # 0 is the rename of the old one, 1 that of the new one, 2 hides the old one, 3 and later remove its files
    for left in (1, 2, 4):
        folder = str(tmp_path / f"run-{left}")
        wanted = run_ranks(1, save_first, folder)[0]
        [outcome] = fresh_ranks(1, replace_and_die, folder, left)
        assert outcome.exitcode == -signal.SIGKILL, outcome
        seen += run_ranks(1, look, folder, wanted)
    assert seen == ["old", "new", "new"]


def adapters(stage: int, folder: str) -> None:
    torch.manual_seed(5)
    plain = Stack(blocks(2, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)).requires_grad_(False)
    plain.layers[1].requires_grad_(True)

    def sharded(stage: int) -> tuple[Stack, onefold.Optimizer]:
        model = onefold.shard(copy.deepcopy(plain), stage=stage)
        return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)

    model, optimizer = sharded(stage)
    train(model, optimizer)
    path = onefold.save(folder, model, optimizer, extra={"epoch": 2}, only="trainable")
    whole = onefold.save(folder + "-whole", model, optimizer)
    torch.distributed.barrier()
    assert sum(f.stat().st_size for f in path.iterdir()) < sum(f.stat().st_size for f in whole.iterdir())
    other, its = sharded(3 - stage)
    assert onefold.load(folder, other, its) == {"epoch": 2}
    train(model, optimizer)
    train(other, its)
    ours, theirs = onefold.full_state_dict(model), onefold.full_state_dict(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    full = onefold.shard(copy.deepcopy(plain).requires_grad_(True), stage=2)
    with pytest.raises(onefold.CheckpointError, match=r"missing in the checkpoint: first\.bias"):
        onefold.load(folder, full)


@pytest.mark.parametrize("stage", [0, 2])
def test_only_what_trains_is_saved_and_loads_into_the_same_frozen_model(stage: int, tmp_path: Path) -> None:
    run_ranks(RANKS, adapters, stage, str(tmp_path / "run"))


def partly_unfrozen(stage: int, folder: str) -> None:
    """One matrix of a frozen block is unfrozen: the rest of its unit is not saved."""

    def start() -> tuple[Stack, onefold.Optimizer, onefold.EMA]:
        torch.manual_seed(5)
        model = Stack(blocks(2, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).requires_grad_(False)
        model.head.requires_grad_(True)
        onefold.shard(model, stage=stage, precision="bf16")
        optimizer, ema = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1), onefold.EMA(model, 0.5)
        model.layers[0].up.weight.requires_grad_(True)
        return model, optimizer, ema

    def run(model: Stack, optimizer: onefold.Optimizer, ema: onefold.EMA) -> None:
        model(torch.ones(2, DIM)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()

    ours, theirs = start(), start()
    run(*ours)
    path = onefold.save(folder, *ours[:2], only="trainable")
    torch.distributed.barrier()
    names = {record.name for record in Checkpoint(Storage(), path).manifest.records if record.kind == "trained"}
    assert names == {"head.weight", "head.bias", "layers.0.up.weight"}, names
    onefold.load(folder, *theirs[:2])
    for each in (ours, theirs):
        run(*each)
    mine, other = (onefold.full_state_dict(model) for model, *_ in (ours, theirs))
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
    mine, other = (ema.full_state_dict() for *_, ema in (ours, theirs))
    assert all(torch.equal(value, other[name]) for name, value in mine.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_frozen_rest_of_a_unit_is_not_saved_with_what_trains(stage: int, tmp_path: Path) -> None:
    run_ranks(RANKS, partly_unfrozen, stage, str(tmp_path / "run"))
