"""Adapters alone in a checkpoint: a run that is resumed from it over the same base goes on bit by bit, at any stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import onefold
from tests.harness import run_ranks

pytest.importorskip("peft")

from tests.peft.adapters import adapted, differing, sharded, train, weights


def saved(stage: int, folder: str) -> list[float]:
    model, optimizer = sharded(adapted(use_dora=True), stage, precision="bf16")
    train(model, optimizer, range(2))
    onefold.save(folder, model, optimizer, only="trainable")
    return [float(loss) for loss in train(model, optimizer, range(2, 4))]


def resumed(stage: int, folder: str) -> list[float]:
    """Over the same base, with other adapters than those that were saved."""
    fresh = adapted(use_dora=True)
    for name, param in fresh.named_parameters():
        if "lora_B" in name:
            param.data.zero_()
    model, optimizer = sharded(fresh, stage, precision="bf16")
    onefold.load(folder, model, optimizer)
    before = weights(model)
    losses = [float(loss) for loss in train(model, optimizer, range(2, 4))]
    assert len(differing(before, weights(model))) == len(before)
    return losses


def test_a_checkpoint_of_adapters_resumes_at_another_stage_and_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    expected = run_ranks(2, saved, 3, folder)
    held = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert held < 150_000  # the base alone has 330 kB in fp32
    for stage in (2, 3):
        assert run_ranks(2, resumed, stage, folder) == expected
    assert run_ranks(1, resumed, 0, folder)[0][0] == pytest.approx(expected[0][0], abs=1e-3)
