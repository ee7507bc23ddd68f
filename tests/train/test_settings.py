"""One tree of settings, from flags and from TOML; what cannot be is one sentence that names the way out."""

import dataclasses
from pathlib import Path

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cost.shapes import named
from onefold.errors import ConfigError
from onefold.train.run.fits import check_fits, on_host
from onefold.train.run.settings import Settings, flat
from onefold.train.run.toml import read_toml, to_toml, with_values

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
trees = st.builds(
    lambda name, lr, out, save, resume, stage, ranks: with_values(
        Settings(),
        {
            "ranks": ranks, "model": {"model": name}, "adam": {"lr": lr}, "zero": {"stage": stage},
            "output": {"out": out}, "checkpoints": {"save_every": save, "resume": resume},
        },
        "here",
    ),
    text, st.floats(allow_nan=False), text, st.integers(0, 10**6), st.booleans(),
    st.integers(0, 3) | st.just("auto"), st.integers(1, 99),
)  # fmt: skip


def parse(*arguments: str) -> Settings:
    return tyro.cli(Settings, args=arguments, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes))


def of(**groups) -> Settings:
    return with_values(Settings(), groups, "here")


@settings(deadline=None, max_examples=50)
@given(trees)
def test_a_tree_written_as_toml_reads_back_as_it_was(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(to_toml(tree))
    assert with_values(Settings(), read_toml(path), "file") == tree


def test_flags_are_flat_and_every_field_has_one_of_its_own():
    names = list(flat(Settings()))
    leaves = sum(len(dataclasses.fields(getattr(Settings(), f.name))) for f in dataclasses.fields(Settings) if
                 dataclasses.is_dataclass(getattr(Settings(), f.name)))  # fmt: skip
    assert len(names) == leaves + 3, "two groups share a name, so their flags would collide"
    found = parse("--lr", "0.5", "--stage", "auto", "--out", "there", "--resume", "--global-batch", "64")
    assert (found.adam.lr, found.zero.stage, found.output.out) == (0.5, "auto", Path("there"))
    assert found.checkpoints.resume and found.steps.global_batch == 64
    assert parse("--stage", "2").zero.stage == 2


def test_the_defaults_are_well():
    for ranks in (1, 2, 8):
        Settings().check(ranks)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"zero": {"stage": 7}}, "stage=7 is unknown; use one of 0, 1, 2, 3 or 'auto'"),
        ({"zero": {"stage": "three"}}, "stage='three' is unknown"),
        ({"zero": {"precision": "int8"}}, "use one of fp32, bf16, fp16"),
        ({"zero": {"mesh": "replica=2,shard=2"}}, "has 4 places, but there are 2 ranks"),
        ({"zero": {"mesh": "pp=2"}}, "see onefold.PipelineStage"),
        ({"zero": {"mesh": "tp=2", "sequence": True, "activations": "partition"}}, "splits block inputs"),
        ({"zero": {"mesh": "shard=2", "sequence": True}}, "--sequence splits along the ranks of tp"),
        ({"zero": {"mesh": "shard"}}, "is not like replica=2,shard=4"),
        ({"zero": {"bucket_mb": 0.0}}, "try 128"),
        ({"steps": {"global_batch": 20, "micro_batch": 8}}, "batches that are: 16, 32, 48; or --micro-batch 5"),
        ({"steps": {"global_batch": 32, "accumulation": 3}}, "leave one of them out"),
        ({"steps": {"steps": 0}}, "--steps 0 is out of range; use a number of at least 1"),
        ({"adam": {"lr": float("nan")}}, "--lr nan is out of range"),
        ({"adam": {"optimizer": "lion"}}, "--optimizer 'lion' is unknown; use one of adamw, muon"),
        ({"adam": {"muon_lr": 0.1}}, "--muon-lr 0.1 says nothing of adamw; add --optimizer muon"),
        ({"adam": {"optimizer": "muon", "muon_lr": 0.0}}, "--muon-lr 0.0 is out of range; use a number above 0"),
        ({"adam": {"optimizer": "muon", "muon_scaling": "none"}}, "use one of original, match_rms_adamw"),
        ({"adam": {"optimizer": "muon", "optimizer_state": "8bit"}}, "--optimizer-state 8bit is for adamw"),
        ({"adam": {"optimizer_state": "4bit"}}, "--optimizer-state '4bit' is unknown; use one of fp32, bf16, 8bit"),
        (
            {"adam": {"optimizer_state": "8bit"}, "zero": {"offload": "disk", "offload_path": "scratch"}},
            "--optimizer-state 8bit is kept on the device or on the host, not on disk; use --offload host",
        ),
        ({"adam": {"min_lr": 1.0}}, "--min-lr 1 is above --lr"),
        ({"data": {"val_fraction": 0.9}}, "--val-fraction 0.9 is out of range"),
        ({"model": {"model": "gpt-9"}}, "model 'gpt-9' is unknown; use one of"),
        ({"zero": {"offload": "tape"}}, "use 'host', 'disk', 'auto' or None"),
        ({"zero": {"offload": "disk"}}, "needs path= (--offload-path): a folder on a fast disk"),
        ({"zero": {"offload_parameters": "host"}}, "set optimizer='host', 'disk' or 'auto' too"),
        ({"zero": {"stage": 2, "offload": "host", "offload_parameters": "host"}}, "needs stage=3, found stage=2"),
        ({"compare": "0,3", "zero": {"offload": "host"}}, "use stage 1, 2 or 3"),
        ({"compare": "0,1,5"}, "use for example 0,1,2,3"),
        ({"output": {"profile": True}, "steps": {"steps": 4}}, "3 steps after 2 of warmup, but --steps is 4"),
        ({"output": {"profile_steps": 0}}, "--profile-steps 0 is out of range; use a number of at least 1"),
        ({"checkpoints": {"accept_changed_data": True}}, "is for a run that is resumed; add --resume, or leave it out"),
        ({"checkpoints": {"resume": True, "resume_or_start": True}}, "give one of them"),
        ({"output": {"profile_steps": 4}}, "--profile-steps 4 records nothing without --profile; add it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(groups, said):
    with pytest.raises(ConfigError) as error:
        of(**groups).check(2)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"adam": {"lrr": 1.0}}, "here, [adam]: 'lrr' is no setting; known are lr, min_lr"),
        ({"adam": 3}, "should be a table: [adam]"),
        ({"steps": {"steps": "many"}}, "should be of type int"),
        ({"steps": {"steps": True}}, "should be of type int"),
        ({"colour": "blue"}, "'colour' is no setting"),
    ],
)
def test_a_file_with_a_mistake_names_it(groups, said):
    with pytest.raises(ConfigError) as error:
        of(**groups)
    assert said in str(error.value)


def test_settings_of_version_0_1_are_read_by_the_names_they_have_now():
    assert of(output={"tensorboard": True}).output.logs == ["tensorboard"]
    assert of(output={"tensorboard": False}).output.logs == []


def test_warmup_is_fifty_steps_and_at_most_a_tenth_of_the_run():
    assert [of().adam.warmup_steps(steps) for steps in (1, 20, 499, 500, 5000)] == [1, 2, 49, 50, 50]
    assert of(adam={"warmup": 30}).adam.warmup_steps(20) == 30 and of(adam={"warmup": 0}).adam.warmup_steps(20) == 0


def test_the_plan_of_a_run_follows_its_settings():
    """A rank of the plan has the states that the stage, the precision and the ranks leave it."""
    shape = named("gpt2")
    machine = dataclasses.replace(on_host(2), memory_bytes=10**12)

    def peak(**groups) -> int:
        return found.peak_bytes if (found := check_fits(of(**groups), shape, 2, machine)) else 0

    assert peak(zero={"stage": 0}) > peak(zero={"stage": 3}) > 12 * shape.numel // 2
    assert peak(steps={"micro_batch": 8}) > peak(steps={"micro_batch": 1})
    assert peak(zero={"activations": "checkpoint"}) < peak(zero={"activations": "keep"})
    assert peak(zero={"offload": "auto"}) == 0
    with pytest.raises(ConfigError, match=r"stage 3 does not fit: .* and 100 MB are there"):
        check_fits(of(), shape, 2, dataclasses.replace(machine, memory_bytes=10**8))


@pytest.mark.parametrize(
    ("groups", "remedies"),
    [
        ({"zero": {"stage": 1}}, "smaller model or batch, --stage 3, --activations checkpoint, --offload host, or"),
        ({"zero": {"activations": "checkpoint"}}, "more ranks, a smaller model or batch, --offload host, or --no-plan"),
        ({"zero": {"offload": "host"}, "steps": {"micro_batch": 1}}, "a smaller model, --activations checkpoint, or"),
    ],
)
def test_a_run_that_cannot_fit_is_told_only_what_it_has_not_tried(groups, remedies):
    machine = dataclasses.replace(on_host(2), memory_bytes=10**7)
    with pytest.raises(ConfigError) as error:
        check_fits(of(**groups), named("gpt2"), 2, machine)
    assert remedies in str(error.value)


def test_the_global_batch_is_micro_batch_times_accumulation_times_ranks():
    assert of(steps={"micro_batch": 3, "accumulation": 5}).steps.split(2) == (30, 5)
    assert of(steps={"micro_batch": 3, "global_batch": 36}).steps.split(2) == (36, 6)
    assert of(steps={"micro_batch": 3}).steps.split(4) == (12, 1)


def test_a_comparison_is_one_run_per_stage_in_folders_of_their_own():
    runs = of(compare="0,3", output={"out": "there"}).stages()
    assert [(run.zero.stage, str(run.output.out)) for run in runs] == [(0, "there/stage-0"), (3, "there/stage-3")]
