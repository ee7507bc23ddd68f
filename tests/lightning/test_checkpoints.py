"""Checkpoints under lightning.pytorch.Trainer: saved by callbacks, resumed by fit(ckpt_path=…), read elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.lightning.lit import Lit, data, fitted, strategy_of, trainer, weights


def first(folder: str, stage: int, **settings: Any) -> Any:
    """On a rank: three epochs, with a checkpoint of each. Losses, weights, and the learning rates at the end."""
    keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True)
    run, module = fitted(stage, max_epochs=3, enable_checkpointing=True, callbacks=[keeper], **settings)
    return module.losses, weights(module), [group["lr"] for group in run.optimizers[0].param_groups]


def resumed(path: str, stage: int, **settings: Any) -> Any:
    """On a rank: goes on from a checkpoint to the end of the third epoch."""
    module = Lit()
    run = trainer(strategy_of(stage), max_epochs=3, **settings)
    run.fit(module, data(), ckpt_path=path)
    return module.losses, weights(module), [group["lr"] for group in run.optimizers[0].param_groups]


def of_checkpoints(folder: str, names: list[tuple[str, int]]) -> Any:
    return [resumed(f"{folder}/{name}.ckpt", stage) for name, stage in names]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_on_bit_for_bit_also_at_another_stage(precision, tmp_path):
    whole = run_ranks(2, first, str(tmp_path), 2, precision=precision)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch={n}.ckpt" for n in range(3)] + ["last.ckpt"]
    assert [path.name for path in (tmp_path / "last.ckpt").iterdir()] == ["step-00000024"]  # the others are replaced
    for stage in (2, 3):
        rest = run_ranks(2, resumed, str(tmp_path / "epoch=0.ckpt"), stage, precision=precision)
        for (losses, values, rates), (more, found, now) in zip(whole, rest, strict=True):
            assert more == losses[8:] and same(found, values) and now == rates


def test_another_number_of_ranks_goes_on_with_the_same_state(tmp_path):
    run_ranks(2, first, str(tmp_path), 3)
    ((two, again, done),) = run_ranks(1, of_checkpoints, str(tmp_path), [("epoch=1", 0), ("epoch=1", 2), ("last", 1)])
    assert len(two[0]) == 16 and two[0] == again[0] and same(two[1], again[1])  # one rank takes all 16 batches
    assert done[0] == []  # three epochs are over


def for_inference(path: str, folder: str) -> Any:
    """On a rank: weights in a plain file, and what reads it."""
    run, module = fitted(3, max_epochs=1)
    run.save_checkpoint(path, weights_only=True)
    plain = Lit.load_from_checkpoint(path, map_location="cpu")
    other = trainer(strategy_of(2))
    other.validate(Lit(), data(8, shuffle=False), ckpt_path=path, verbose=False)
    run.save_checkpoint(folder)
    run.validate(module, data(8, shuffle=False), verbose=False)
    third = trainer(strategy_of(0))
    third.validate(Lit(), data(8, shuffle=False), ckpt_path=folder, verbose=False)
    metrics = [float(one.callback_metrics["val"]) for one in (run, other, third)]
    return weights(module), plain.state_dict(), metrics


def test_weights_alone_are_a_plain_file_for_load_from_checkpoint_and_validate(tmp_path):
    path, folder = tmp_path / "weights.ckpt", tmp_path / "all.ckpt"
    for values, plain, metrics in run_ranks(2, for_inference, str(path), str(folder)):
        assert same(plain, values) and len(set(metrics)) == 1
    assert path.is_file() and folder.is_dir()
    exported = onefold.export(folder, tmp_path / "safetensors")
    assert exported.files == ("model.safetensors",)
    onefold.export(folder, tmp_path / "all.pt", format="torch")
    module = Lit()
    module.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True)["model"])
    assert same(module.state_dict(), plain)


class Hooked(Lit):
    """Has hooks that look at checkpoints, as in Lightning's own documentation."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if "net" in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["epoch"], sorted(checkpoint["state_dict"])


def of_lightning(folder: str) -> Any:
    """On a rank: a run of DDP, whose file is imported at its half; and one of Onefold, validated before it is saved."""
    whole, half = (fitted("ddp", Hooked, max_epochs=epochs) for epochs in (2, 1))
    half[0].save_checkpoint(f"{folder}/ddp.ckpt")
    if half[0].is_global_zero:
        onefold.import_checkpoint(f"{folder}/ddp.ckpt", f"{folder}/imported")
    half[0].strategy.barrier()
    mine, module = fitted(3, Hooked, max_epochs=1)
    mine.validate(module, data(8, shuffle=False), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)
    mine.save_checkpoint(f"{folder}/mine")
    found = []
    for name in ("imported", "mine"):
        rest = Hooked()
        trainer(strategy_of(2)).fit(rest, data(), ckpt_path=f"{folder}/{name}")
        found.append((rest.losses, rest.loaded))
    return whole[1].losses[8:], found


def test_a_file_of_lightnings_is_imported_with_its_optimizer_and_fit_goes_on(tmp_path):
    for wanted, found in run_ranks(2, of_lightning, str(tmp_path)):
        for losses, loaded in found:
            assert losses == pytest.approx(wanted, abs=1e-6) and loaded == (1, [])
    for name, what in (("ddp.ckpt", "this is a file"), ("none.ckpt", "there is nothing")):
        for error in run_ranks_raises(2, resumed, str(tmp_path / name), 2):
            assert error.type_name == "CheckpointError" and what in error.message
            assert "onefold import-checkpoint" in error.message and "load_from_checkpoint" in error.message


def test_what_would_be_lost_is_not_saved(tmp_path):
    Path(tmp_path / "epoch=0.ckpt").write_text("not ours")
    for error in run_ranks_raises(2, onto, str(tmp_path / "epoch=0.ckpt")):
        assert error.type_name == "CheckpointError" and "is a file" in error.message
    assert (tmp_path / "epoch=0.ckpt").read_text() == "not ours"
    for error in run_ranks_raises(2, onto, str(tmp_path / "more.ckpt"), add=True):
        assert error.type_name == "CheckpointError" and "on_save_checkpoint put more into" in error.message
    for error in run_ranks_raises(2, too_early, str(tmp_path / "early.ckpt")):
        assert error.type_name == "CheckpointError" and "call fit or validate" in error.message


class Adding(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["more"] = torch.ones(1)


def onto(path: str, *, add: bool = False) -> None:
    run, _ = fitted(1, Adding if add else Lit, max_epochs=1)
    run.save_checkpoint(path)


def too_early(path: str) -> None:
    run = trainer(strategy_of(1))
    run.strategy.connect(Lit())
    run.save_checkpoint(path)
