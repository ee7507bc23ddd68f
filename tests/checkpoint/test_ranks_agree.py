"""Whatever one rank meets, every rank raises the same named error, and the checkpoint before it still loads."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol.save import save_on
from tests.harness import run_ranks, run_ranks_raises


class Full(Storage):
    """The disk is full from the n-th operation on; reading works."""

    def __init__(self, after: int) -> None:
        self.left = after

    def at(self, operation: str, path: Path) -> None:
        if operation not in ("names", "exists", "is_folder", "size", "read", "remove", "remove_folder"):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def small(stage: int = 2, seed: int = 0, **fields: Any) -> tuple[nn.Module, onefold.Optimizer]:
    torch.manual_seed(seed)
    model = onefold.shard(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), stage=stage, **fields)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)


def step(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    optimizer.backward(model(torch.randn(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[float]:
    with onefold.full_parameters(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def said(call: Any, *args: Any, **kwargs: Any) -> str | None:
    """The error, by name and words."""
    try:
        call(*args, **kwargs)
    except onefold.OnefoldError as error:
        return f"{type(error).__name__}: {error}"
    return None


def fill_the_disk(folder: str, full_rank: int, wait: bool) -> list[tuple[str, bool, int]]:
    """For every operation of a save: what this rank raised, whether what then loads is whole, and how much was left."""
    onefold.init()
    model, optimizer = small()
    step(model, optimizer)
    onefold.save(folder, model, optimizer, extra=weights(model), step=1)
    found = []
    for operations in range(1000):
        step(model, optimizer)
        mine = torch.distributed.get_rank() == full_rank
        storage = Full(operations) if mine else Storage()

        def save(number: int = operations + 2, storage: Storage = storage) -> None:
            save_on(storage, folder, model, optimizer, extra=weights(model), step=number, wait=wait)
            onefold.finish_saves()

        error = said(save)
        if error is None:
            break
        other, its = small(seed=1)
        right = weights(other) != onefold.load(folder, other, its) == weights(other)
        found.append((error, right, sum(name.startswith(".") for name in os.listdir(folder))))
    return found


@pytest.mark.parametrize(
    ("full_rank", "wait"),
    [
        pytest.param(0, True, marks=pytest.mark.soak),
        (1, True),
        (0, False),
        pytest.param(1, False, marks=pytest.mark.soak),
    ],
)
def test_a_full_disk_raises_the_same_error_on_every_rank_and_spares_the_last_checkpoint(full_rank, wait, tmp_path):
    answers = run_ranks(2, fill_the_disk, str(tmp_path), full_rank, wait)
    assert answers[0] == answers[1]
    assert len(answers[0]) >= (8 if full_rank == 0 else 3)  # every operation was met
    for error, loads, leftovers in answers[0]:
        assert error.startswith(f"CheckpointError: rank {full_rank}: could not ") and "No space left" in error
        assert loads
        assert leftovers == 0 or full_rank == 0  # whose own disk would not let it tidy up
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def save_where_no_one_may(folder: str) -> str | None:
    onefold.init()
    model, optimizer = small()
    return said(onefold.save, folder, model, optimizer)


def test_a_folder_that_cannot_be_made_raises_the_same_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    first, second = run_ranks(2, save_where_no_one_may, str(tmp_path / "file" / "run"))
    assert first == second and first.startswith("CheckpointError: rank 0: could not")


def ask_differently(folder: str) -> str | None:
    onefold.init()
    model, optimizer = small()
    return said(onefold.save, folder, model, optimizer, step=torch.distributed.get_rank())


def test_ranks_that_ask_for_different_checkpoints_are_told(tmp_path):
    first, second = run_ranks(2, ask_differently, str(tmp_path))
    assert first == second and "give the same on every rank" in first
    assert os.listdir(tmp_path) == []


def give_one_optimizer(folder: str) -> str | None:
    onefold.init()
    model, optimizer = small()
    return said(onefold.save, folder, model, None if torch.distributed.get_rank() else optimizer, step=1)


def test_an_optimizer_that_only_some_ranks_save_is_refused(tmp_path):
    first, second = run_ranks(2, give_one_optimizer, str(tmp_path))
    assert first == second and "how many optimizers are given" in first
    assert os.listdir(tmp_path) == []


def load_differently(folder: str) -> list[str | None]:
    onefold.init()
    model, optimizer = small()
    step(model, optimizer)
    onefold.save(folder, model, optimizer)
    first = torch.distributed.get_rank() == 0
    return [
        said(onefold.load, folder, model, optimizer if first else None),
        said(onefold.load, folder, model, optimizer, fallback=first),
        said(onefold.load, folder, model, optimizer, subset="0.*" if first else "1.*"),
        said(onefold.load, folder, model, optimizer, rename={"0.": "1."} if first else None),
        said(step, model, optimizer),
    ]


def test_ranks_that_load_differently_are_told_before_anything_changes(tmp_path):
    first, second = run_ranks(2, load_differently, str(tmp_path))
    assert first == second and first.pop() is None
    assert all(error.startswith("CheckpointError") and "give the same on every rank" in error for error in first)


def save_what_cannot_be_saved(folder: str, value: Any) -> str | None:
    onefold.init()
    model, optimizer = small()
    extra = {"fine": 1, "odd": [value]} if torch.distributed.get_rank() == 1 else None
    return said(onefold.save, folder, model, optimizer, extra=extra)


def test_what_a_checkpoint_cannot_hold_is_named_on_every_rank(tmp_path):
    for value, name in ((Path("x"), "pathlib"), ({1, 2}, "builtins.set"), (1j, "builtins.complex")):
        first, second = run_ranks(2, save_what_cannot_be_saved, str(tmp_path), value)
        assert first == second and "rank 1: extra/odd/0" in first and name in first


def save_twice(folder: str) -> list[str | None]:
    onefold.init()
    model, optimizer = small()
    onefold.save(folder, model, optimizer)
    return [said(onefold.save, folder, model, optimizer)]


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    for (error,) in run_ranks(2, save_twice, str(tmp_path)):
        assert error.startswith("CheckpointError: rank 0:") and "step-00000000 is committed" in error


def break_on_one_rank(folder: str, how: str) -> None:
    """A file that rank 0 wrote is damaged; only some ranks read it."""
    onefold.init()
    model, optimizer = small(stage=3)
    step(model, optimizer)
    path = onefold.save(folder, model, optimizer)
    if torch.distributed.get_rank() == 0:
        target = path / "rank-00000.safetensors"
        data = bytearray(target.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        target.write_bytes(data)
    torch.distributed.barrier()
    if how == "ruin and go on":
        said(onefold.load, folder, model, optimizer)
        step(model, optimizer)
    onefold.load(folder, model, optimizer)


def test_damage_that_one_rank_meets_is_raised_by_all(tmp_path):
    errors = run_ranks_raises(2, break_on_one_rank, str(tmp_path), "load")
    assert {(error.type_name, error.message) for error in errors} == {("CheckpointDamaged", errors[0].message)}
    assert "rank-00000.safetensors" in errors[0].message


def test_a_model_that_was_loaded_half_way_refuses_to_run(tmp_path):
    errors = run_ranks_raises(2, break_on_one_rank, str(tmp_path), "ruin and go on")
    assert [error.type_name for error in errors] == ["StateError"] * 2
    assert "load() failed half way" in errors[0].message


def mend(folder: str) -> list[str | None]:
    """A model that was loaded half way, and loads that would leave some of it as it is."""
    onefold.init()
    model, optimizer = small(stage=3)
    step(model, optimizer)
    good = onefold.save(folder + "/good", model, optimizer)
    bad = onefold.save(folder + "/bad", model, optimizer)
    if torch.distributed.get_rank() == 0:
        data = bytearray((bad / "rank-00000.safetensors").read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        (bad / "rank-00000.safetensors").write_bytes(data)
    torch.distributed.barrier()
    return [
        said(onefold.load, bad, model, optimizer),
        said(onefold.load, good, model, optimizer, subset="0.*"),
        said(onefold.load, good, model),
        said(onefold.load, good, model, optimizer),
        said(step, model, optimizer),
    ]


def test_a_model_that_was_loaded_half_way_is_mended_by_a_whole_load_only(tmp_path):
    first, second = run_ranks(2, mend, str(tmp_path))
    assert first == second and first[0].startswith("CheckpointDamaged")
    assert [error.split(":")[0] for error in first[1:3]] == ["StateError"] * 2
    assert "all of it, with the optimizer" in first[1] and first[3:] == [None, None]


def fall_back(folder: str) -> tuple[Any, Any, list[str]]:
    onefold.init()
    model, optimizer = small()
    for number in (1, 2, 3):
        step(model, optimizer)
        path = onefold.save(folder, model, optimizer, extra={"number": number, "weights": weights(model)})
        if number > 1 and torch.distributed.get_rank() == 0:
            os.truncate(path / "rank-00001.safetensors", (path / "rank-00001.safetensors").stat().st_size - 8)
    torch.distributed.barrier()
    strict = said(onefold.load, folder, model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = onefold.load(folder, model, optimizer, fallback=True)
    right = extra == {"number": 1, "weights": weights(model)} and optimizer.steps == 1
    step(model, optimizer)
    onefold.save(folder, model, optimizer)  # step 2 again: the damaged one is out of the way
    return strict, right, [str(w.message) for w in caught]


def test_load_falls_back_to_the_last_sound_checkpoint_loudly_and_only_if_asked(tmp_path):
    (strict, right, warned), (other_strict, other_right, _) = run_ranks(2, fall_back, str(tmp_path))
    assert strict == other_strict and strict.startswith("CheckpointDamaged: ") and "step-00000003" in strict
    assert right and other_right
    assert [("step-00000003" in text, "step-00000002" in text) for text in warned] == [(True, False), (False, True)]
    assert committed(Storage(), tmp_path) == [1, 2]
    assert len([name for name in os.listdir(tmp_path) if name.startswith("damaged-")]) == 2
