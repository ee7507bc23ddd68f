"""Training on a mesh: tensors or sequences split over ranks, activations computed again; the losses of a plain run."""

from __future__ import annotations

from pathlib import Path

import pytest

from onefold.train.run.records import read_facts, read_metrics
from tests.train.launched import curve
from tests.train.pooled import trained

FOUR = {"steps": 6, "global_batch": 8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Two ranks, everything whole and kept."""
    out = tmp_path_factory.mktemp("mesh") / "plain"
    trained(2, out, steps=FOUR)
    return out


@pytest.mark.parametrize(
    ("ranks", "zero"),
    [
        pytest.param(2, {"mesh": "tp=2", "stage": 2}, marks=pytest.mark.soak),
        (4, {"mesh": "shard=2,tp=2", "stage": 3, "sequence": True, "activations": "checkpoint+host"}),
        pytest.param(4, {"mesh": "shard=2,tp=2", "stage": 3}, marks=pytest.mark.soak),
        (4, {"mesh": "shard=2,sequence=2", "stage": 3}),
        pytest.param(2, {"mesh": "tp=2", "activations": "partition"}, marks=pytest.mark.soak),
    ],
)
def test_tensors_or_sequences_split_over_ranks_learn_what_whole_ones_do(ranks, zero, plain, tmp_path):
    trained(ranks, tmp_path / "split", steps=FOUR, zero=zero, plan="tp" in zero["mesh"])
    for before, after in zip(read_metrics(plain), read_metrics(tmp_path / "split"), strict=True):
        for figure in [name for name in ("loss", "grad_norm", "lr", "val_loss") if before[name] is not None]:
            assert after[figure] == pytest.approx(before[figure], rel=1e-4), (after["step"], figure)
    facts = read_facts(tmp_path / "split")
    assert (facts["ranks"], facts["global_batch"]) == (ranks, 8)
    if "tp" in zero["mesh"]:  # and the report has a plan beside what was measured
        row, plan = read_metrics(tmp_path / "split")[-2], facts["plan"]  # a step without an evaluation
        for state in ("parameters", "gradients", "optimizer"):  # param groups have a step count each
            assert row["memory"][state] == pytest.approx(plan["memory"][state], rel=1e-3)
        for purpose in ("gather-forward", "gather-backward", "reduce", "tp-gradient"):
            assert row["traffic"].get(purpose) == plan["traffic"].get(purpose)
        assert row["memory"]["peak"] == pytest.approx(plan["peak_bytes"], rel=0.1)


def test_muon_on_tensors_split_over_ranks_learns_what_it_does_on_whole_ones(tmp_path):
    muon = {"optimizer": "muon", "muon_lr": 0.01, "lr": 1e-3}
    for ranks, name, zero in ((2, "whole", {"stage": 2}), (4, "split", {"mesh": "shard=2,tp=2", "stage": 3})):
        trained(ranks, tmp_path / name, steps=FOUR, adam=muon, zero=zero)
    for before, after in zip(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "split"), strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4), after["step"]


@pytest.mark.parametrize("policy", [pytest.param("checkpoint", marks=pytest.mark.soak), "checkpoint+host", "auto"])
def test_activations_that_are_computed_again_change_no_bit(policy, plain, tmp_path):
    trained(2, tmp_path / "again", steps=FOUR, zero={"activations": policy})
    assert curve(tmp_path / "again") == curve(plain)


def test_a_run_goes_on_with_its_tensors_split_another_way(plain, tmp_path):
    out = tmp_path / "run"
    trained(2, out, steps={**FOUR, "steps": 3})
    trained(4, out, steps=FOUR, zero={"mesh": "shard=2,tp=2"}, checkpoints={"resume": True})
    assert [row["step"] for row in read_metrics(out)] == list(range(1, 7))
    assert read_metrics(out)[-1]["loss"] == pytest.approx(read_metrics(plain)[-1]["loss"], rel=1e-2)
