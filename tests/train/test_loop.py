"""Losses are the same bits at every stage; a run that is interrupted goes on as if it had not been."""

import json
import shutil
from pathlib import Path

import pytest

from onefold.train.run.records import read_facts, read_metrics, read_warnings
from onefold.train.run.settings import Settings
from onefold.train.run.toml import read_toml, with_values
from tests.harness import run_ranks
from tests.train.launched import curve
from tests.train.pooled import one_rank, settings_of, trained

LR = {"lr": 1e-3}  # not that of the settings
ACCUMULATED = {"accumulation": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nobody disturbs, with all its checkpoints."""
    out = tmp_path_factory.mktemp("loop") / "whole"
    trained(2, out, adam=LR, checkpoints={"keep": 9}, plan=True)
    return out


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_losses_are_the_same_bits_at_every_stage(tmp_path, precision):
    curves = []
    for stage in range(4):
        out = tmp_path / f"stage{stage}"
        trained(2, out, zero={"stage": stage, "precision": precision}, steps=ACCUMULATED)
        curves.append(curve(out))
        assert read_facts(out)["stage"] == stage
    assert len(curves[0]) == 12
    assert curves[1:] == curves[:1] * 3


@pytest.mark.soak  # the compiler takes half a minute
def test_compiled_blocks_are_planned_uncompiled_and_train_to_the_same_losses(whole, tmp_path):
    trained(2, tmp_path / "run", adam=LR, output={"compile": True}, plan=True, timeout_s=600)
    assert read_facts(tmp_path / "run")["plan"] == read_facts(whole)["plan"]
    losses = [[row["loss"] for row in read_metrics(one)] for one in (tmp_path / "run", whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_row_has_all_figures_and_they_are_those_that_were_planned(whole):
    facts, rows = read_facts(whole), read_metrics(whole)
    row = rows[-1]
    times = [row["time"] for row in rows]
    assert times == sorted(times) and times[0] > 1.7e9, "seconds since 1970"
    assert row["traffic"]["reduce"] == facts["plan"]["traffic"]["reduce"] > 0
    assert row["traffic_bytes"] == sum(row["traffic"].values())
    assert row["memory"]["peak"] == pytest.approx(facts["plan"]["peak_bytes"], rel=0.1)
    for name, size in facts["plan"]["memory"].items():
        assert row["memory"][name] == pytest.approx(size, rel=0.1), name
    assert row["val_ppl"] > 1 and row["loss_scale"] is None and row["mfu"] is None
    assert [r["step"] for r in rows if r["val_loss"] is not None] == [5, 10, 12]
    assert facts["tokens_per_step"] == facts["global_batch"] * 16 == 4 * 16
    assert json.loads(json.dumps(row)) == row


def test_moments_in_8_bits_take_the_bytes_that_were_planned(whole, tmp_path):
    adam, few = {**LR, "optimizer_state": "8bit"}, {"steps": 3, "eval_every": 0}
    trained(2, tmp_path / "run", adam=adam, steps=few, plan=True)
    [*_, row], wide = read_metrics(tmp_path / "run"), read_metrics(whole)[-1]
    planned = read_facts(tmp_path / "run")["plan"]["memory"]["optimizer"]
    assert row["memory"]["optimizer"] == pytest.approx(planned, rel=0.01)
    assert row["memory"]["optimizer"] == pytest.approx(wide["memory"]["optimizer"] * 2.03 / 8, rel=0.01)


def test_the_saved_settings_repeat_the_run(whole, tmp_path):
    values = read_toml(whole / "config.toml")
    again = with_values(with_values(Settings(), values, "file"), {"output": {"out": str(tmp_path / "again")}}, "test")
    run_ranks(2, one_rank, again)
    assert curve(tmp_path / "again") == curve(whole)


def copied(run: Path, to: Path, upto: int) -> Path:
    """The run as it was when its checkpoint of a step was committed, with rows of later steps left over."""
    (to / "checkpoints").mkdir(parents=True)
    name = f"step-{upto:08}"
    shutil.copytree(run / "checkpoints" / name, to / "checkpoints" / name)
    for file in ("metrics.jsonl", "warnings.jsonl"):
        (to / file).write_text((run / file).read_text())
    return to


def test_a_run_goes_on_bit_for_bit_also_at_another_stage(whole, tmp_path):
    for stage in (3, 1):
        out = copied(whole, tmp_path / f"again{stage}", upto=5)
        trained(2, out, adam=LR, zero={"stage": stage}, checkpoints={"resume": True}, plan=stage == 1)
        assert curve(out) == curve(whole)
        assert ("plan" in read_facts(out)) == (stage == 1)


def test_a_run_goes_on_at_another_number_of_ranks_with_the_same_batches(whole, tmp_path):
    out = copied(whole, tmp_path / "again", upto=5)
    trained(1, out, adam=LR, steps={"global_batch": 4}, checkpoints={"resume": True})
    ours, theirs = curve(out), curve(whole)
    assert list(ours) == list(theirs)
    assert all(ours[step] == theirs[step] for step in range(1, 6))
    for step in range(6, 13):
        assert ours[step][0] == pytest.approx(theirs[step][0], rel=1e-4)


def test_a_run_with_muon_has_the_figures_that_were_planned_and_goes_on_at_another_stage_and_tier(tmp_path):
    muon = {"optimizer": "muon", "muon_lr": 0.01, "lr": 1e-3}
    whole = tmp_path / "whole"
    trained(2, whole, adam=muon, checkpoints={"keep": 9}, plan=True)
    again = copied(whole, tmp_path / "again", upto=5)
    on_disk = {"stage": 1, "offload": "disk", "offload_path": str(tmp_path)}
    trained(2, again, adam=muon, zero=on_disk, checkpoints={"resume": True}, plan=True)
    assert curve(again) == curve(whole)
    facts, row = read_facts(whole), read_metrics(whole)[-1]
    for name in ("whole-gradient", "whole-direction"):
        assert row["traffic"][name] == facts["plan"]["traffic"][name] > 0
    assert row["memory"]["optimizer"] == facts["plan"]["memory"]["optimizer"]
    assert row["memory"]["peak"] == pytest.approx(facts["plan"]["peak_bytes"], rel=0.1)


def test_a_batch_is_the_same_however_it_is_split(whole, tmp_path):
    losses = [[row[0] for row in curve(whole).values()]]  # two ranks, two rows each
    for ranks, micro in ((1, 4), (2, 1)):
        out = tmp_path / f"{ranks}x{micro}"
        trained(ranks, out, adam=LR, steps={"micro_batch": micro, "global_batch": 4})
        losses.append([row[0] for row in curve(out).values()])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_a_run_that_is_done_is_left_as_it_is(whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    assert trained(2, out, adam=LR, checkpoints={"resume": True}).finished
    assert curve(out) == curve(whole)


def test_ranks_on_a_mesh_train_one_model(whole, tmp_path):
    trained(2, tmp_path / "mesh", adam=LR, zero={"stage": 2, "mesh": "replica=2,shard=1"})
    plain, mesh = curve(whole), curve(tmp_path / "mesh")
    assert [row[0] for row in mesh.values()] == pytest.approx([row[0] for row in plain.values()], rel=1e-5)


@pytest.mark.parametrize(("lr", "warned"), [(1e-12, True), (1e-6, False)])
def test_updates_that_get_lost_are_noticed_and_a_master_in_fp32_loses_few(tmp_path, lr, warned):
    trained(2, tmp_path / "run", zero={"precision": "bf16"}, adam={"lr": lr, "min_lr": lr}, steps={"steps": 3})
    found = [row for row in read_warnings(tmp_path / "run") if row["kind"] == "lost-updates"]
    assert bool(found) is warned
    if warned:
        assert "raise --lr" in found[0]["message"]
        assert {row["rank"] for row in found} == {0, 1}


def test_a_settings_error_of_one_rank_is_raised_on_all(tmp_path):
    settings = settings_of(tmp_path / "run", data={"data": str(tmp_path / "gone")})
    with pytest.raises(Exception, match="is not there"):
        run_ranks(2, one_rank, settings)
