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


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_on_bit_for_bit_also_at_another_stage(precision, tmp_path):
    whole = run_ranks(2, first, str(tmp_path), 2, precision=precision)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch={n}.ckpt" for n in range(3)] + ["last.ckpt"]
    for stage in (2, 3):
        rest = run_ranks(2, resumed, str(tmp_path / "epoch=0.ckpt"), stage, precision=precision)
        for (losses, values, rates), (more, found, now) in zip(whole, rest, strict=True):
            assert more == losses[8:] and same(found, values) and now == rates


def test_another_number_of_ranks_goes_on_with_the_same_state(tmp_path):
    run_ranks(2, first, str(tmp_path), 3)
    (two,) = run_ranks(1, resumed, str(tmp_path / "epoch=1.ckpt"), 0)
    (again,) = run_ranks(1, resumed, str(tmp_path / "epoch=1.ckpt"), 2)
    assert len(two[0]) == 16 and two[0] == again[0] and same(two[1], again[1])  # one rank takes all 16 batches
    done = run_ranks(1, resumed, str(tmp_path / "last.ckpt"), 1)[0]
    assert done[0] == []  # three epochs are over


def test_last_ckpt_is_replaced_and_holds_one_checkpoint(tmp_path):
    run_ranks(2, first, str(tmp_path), 1)
    (only,) = (tmp_path / "last.ckpt").glob("step-*")
    assert only.name == "step-00000024" and not list((tmp_path / "last.ckpt").glob(".*"))


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


def test_fit_from_a_plain_file_says_what_to_do_instead(tmp_path):
    path = tmp_path / "weights.ckpt"
    run_ranks(2, for_inference, str(path), str(tmp_path / "all.ckpt"))
    for error in run_ranks_raises(2, resumed, str(path), 2):
        assert error.type_name == "CheckpointError" and "load_from_checkpoint" in error.message


def test_where_a_file_is_no_checkpoint_is_written(tmp_path):
    Path(tmp_path / "epoch=0.ckpt").write_text("not ours")
    for error in run_ranks_raises(2, onto, str(tmp_path / "epoch=0.ckpt")):
        assert error.type_name == "CheckpointError" and "is a file" in error.message
    assert (tmp_path / "epoch=0.ckpt").read_text() == "not ours"


def onto(path: str) -> None:
    run, _ = fitted(1, max_epochs=1)
    run.save_checkpoint(path)
