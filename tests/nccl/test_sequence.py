"""Sequences cut over ranks, over NCCL: attention is one process's, bytes are by formula, stages agree bitwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.nccl.ranks import MARKS, run_nccl
from tests.sequence.runs import Run, alone, train_all
from tests.sequence.test_attention import compare_all

pytestmark = MARKS
TRAINED = {
    2: [
        Run(), Run("packed", heads=3, key_heads=1, window=4), Run("odd", fields=(("activations", "checkpoint+host"),)),
        Run("padded", fields=(("precision", "bf16"),)),
    ],
    4: [Run("packed", axes=(("shard", 2), ("sequence", 2)), micro=2), Run("odd", axes=(("sequence", 4),), key_heads=2)],
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_and_its_gradients_are_one_process_s_and_bytes_are_by_formula(ranks: int) -> None:
    assert [row for rank in run_nccl(ranks, compare_all, timeout_s=120) for row in rank] == []


@pytest.mark.parametrize("ranks", TRAINED)
def test_training_is_as_in_one_process_and_stages_agree_bitwise(ranks: int) -> None:
    runs = [dataclasses.replace(run, stage=stage) for run in TRAINED[ranks] for stage in range(4)]
    found = run_nccl(ranks, train_all, runs, timeout_s=180)
    for number, run in enumerate(TRAINED[ranks]):
        first, *others = found[0][4 * number : 4 * number + 4]
        assert all(rank[4 * number].losses == first.losses for rank in found), run
        for stage, other in enumerate(others, 1):
            assert other.losses == first.losses, (run, stage)
            assert all(torch.equal(other.params[name], value) for name, value in first.params.items()), (run, stage)
        wanted, near = alone(run), 2e-2 if ("precision", "bf16") in run.fields else 1e-4
        assert first.losses == pytest.approx(wanted.losses, rel=near)
        for name, value in wanted.params.items():
            torch.testing.assert_close(first.params[name].cpu(), value, rtol=10 * near, atol=near)
