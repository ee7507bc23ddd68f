"""Training on a mesh: tensors split over ranks, activations computed again; the losses of a run without either."""

from __future__ import annotations

import pytest

from onefold.train.run import read_facts, read_metrics
from tests.train.launched import curve
from tests.train.pooled import trained

FOUR = {"steps": 6, "global_batch": 8}


@pytest.mark.parametrize(
    ("ranks", "zero"),
    [
        (2, {"mesh": "tp=2", "stage": 2}),
        (4, {"mesh": "shard=2,tp=2", "stage": 3}),
        (2, {"mesh": "tp=2", "sequence": True, "activations": "checkpoint+host"}),
        (2, {"mesh": "tp=2", "activations": "partition"}),
    ],
)
def test_tensors_split_over_ranks_learn_what_whole_ones_do(ranks, zero, tmp_path):
    trained(2, tmp_path / "plain", steps=FOUR)
    trained(ranks, tmp_path / "split", steps=FOUR, zero=zero)
    for before, after in zip(read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "split"), strict=True):
        for figure in [name for name in ("loss", "grad_norm", "lr", "val_loss") if before[name] is not None]:
            assert after[figure] == pytest.approx(before[figure], rel=1e-4), (after["step"], figure)
    facts = read_facts(tmp_path / "split")
    assert (facts["ranks"], facts["global_batch"]) == (ranks, 8)


@pytest.mark.parametrize("policy", ["checkpoint", "checkpoint+host", "auto"])
def test_activations_that_are_computed_again_change_no_bit(policy, tmp_path):
    trained(2, tmp_path / "plain", steps=FOUR)
    trained(2, tmp_path / "again", steps=FOUR, zero={"activations": policy})
    assert curve(tmp_path / "again") == curve(tmp_path / "plain")


def test_a_run_goes_on_with_its_tensors_split_another_way(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    trained(2, whole, steps=FOUR)
    trained(2, out, steps={**FOUR, "steps": 3})
    trained(4, out, steps=FOUR, zero={"mesh": "shard=2,tp=2"}, checkpoints={"resume": True})
    assert [row["step"] for row in read_metrics(out)] == list(range(1, 7))
    assert read_metrics(out)[-1]["loss"] == pytest.approx(read_metrics(whole)[-1]["loss"], rel=1e-2)
