"""`python -m onefold.hf`: an unmodified script trains as under DDP, at every stage, however it was launched."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.integrations.deepspeed_schedules import Schedule
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import with_soak
from tests.hf.launched import ACCELERATE, FLAGS, SCRIPTS, TORCHRUN, results, save_models, start

pytest.importorskip("accelerate")
pytest.importorskip("trl")

MAIN = str(SCRIPTS / "main.py")
STAGES = (0, 1, 2, 3)
COMPARED = ("train", "subclass", "seq2seq")  # TRL at every stage: test_trl.py
TRAINED = ("train", "subclass", "not averaged", "seq2seq", "sft", "dpo")


def run_script(words: list[str], under: list[str] | None) -> int:
    """On a warm rank: runs the script as `python`, or with options `under` as `python -m onefold.hf`, would."""
    from onefold.hf.launch import run
    from onefold.hf.launch_settings import parse

    argv, path, modules = sys.argv, list(sys.path), set(sys.modules)
    try:
        if under is None:
            sys.argv, sys.path[0] = [MAIN, *words], str(SCRIPTS)
            runpy.run_path(MAIN, run_name="__main__")
        else:
            run(parse([*under, MAIN, *words]))
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in set(sys.modules) - modules:  # the script's own, which are like any other's: data, training
            if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    return 0


def warm(ranks: int, folder: Path, name: str, under: list[str] | None, *flags: str) -> list[dict[str, Any]]:
    out = folder / name
    words = [*FLAGS, "--models", str(folder), "--results", str(out), "--output_dir", str(folder / "out"), *flags]
    run_ranks(ranks, run_script, words, under)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def ddp(models: Path) -> list[dict[str, Any]]:
    return warm(2, models, "ddp", None)


@pytest.fixture(scope="module")
def stages(models: Path) -> list[list[dict[str, Any]]]:
    few = ["--parts", ",".join(COMPARED)]
    return [warm(2, models, f"stage{n}", ["--stage", str(n)], *(few if n < 3 else [])) for n in STAGES]


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def test_all_stages_log_and_generate_the_same_bits(stages: list[list[dict[str, Any]]]) -> None:
    """Where gradients accumulate stages 0 and 1 reduce once, 2 and 3 each time: those are alike in pairs."""
    for part in COMPARED:
        found = [[rank[part] for rank in one] for one in stages]
        assert found[0] == found[1] and found[2] == found[3], part
        assert found[0] == found[2] or part == "subclass", part


@pytest.mark.parametrize("part", TRAINED)
def test_losses_are_those_of_ddp(part: str, ddp: list[dict[str, Any]], stages: list[list[dict[str, Any]]]) -> None:
    for plain, found in zip(ddp, stages[3], strict=True):
        assert len(plain[part]["losses"]) == 3
        assert found[part]["losses"] == pytest.approx(plain[part]["losses"], rel=1e-6)
        assert without(found[part], "losses", "evaluated") == without(plain[part], "losses", "evaluated")
        if "evaluated" in plain[part]:
            assert found[part]["evaluated"] == pytest.approx(plain[part]["evaluated"], rel=1e-6)


def test_every_sample_is_evaluated_once_and_in_order(stages: list[list[dict[str, Any]]]) -> None:
    for found in stages[3]:
        assert len(found["ordering"]) == 8 and all(found["ordering"].values())


def test_losses_averaged_over_tokens_are_those_of_one_rank(models: Path, stages: list[list[dict[str, Any]]]) -> None:
    """Sentences differ in length: the mean of the ranks' own means is another number."""
    one = warm(1, models, "one", None, "--per_device_train_batch_size", "4", "--parts", "train")[0]["train"]["losses"]
    assert stages[3][0]["train"]["losses"] == pytest.approx(one, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(stages[3][0]["not averaged"]["losses"], one, strict=True)) > 1e-3


def test_a_mesh_that_cuts_sequences_gives_trl_the_losses_of_one_rank(models: Path) -> None:
    one = warm(1, models, "one", None, "--parts", "sft,dpo")[0]
    for rank in warm(2, models, "cut", ["--stage", "3", "--mesh", "sequence=2"], "--parts", "sft,dpo"):
        for part in ("sft", "dpo"):
            assert rank[part]["losses"] == pytest.approx(one[part]["losses"], rel=3e-6)
        assert rank["sft"]["accuracies"] == pytest.approx(one["sft"]["accuracies"])


DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}  # fmt: skip
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4}}


def test_a_deepspeed_configuration_leaves_auto_to_the_trainer(models: Path, stages: list[list[dict[str, Any]]]) -> None:
    file = models / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    found = warm(2, models, "deepspeed", ["--zero", str(file)], "--parts", "train")
    assert [one["train"] for one in found] == [one["train"] for one in stages[2]]
    file.write_text(json.dumps({**DEEPSPEED, "scheduler": SCHEDULE}))
    rates = warm(2, models, "deepspeed", ["--zero", str(file)], "--parts", "train")[0]["train"]["rates"]
    schedule = Schedule("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4})
    assert rates == pytest.approx([schedule.learning_rate(step, 1e-2) for step in range(3)])


def test_wrong_combinations_are_refused_before_training(models: Path) -> None:
    file = models / "other.json"
    file.write_text(json.dumps({**DEEPSPEED, "gradient_clipping": 0.5}))
    words = [*FLAGS, "--models", str(models), "--results", "x", "--output_dir", str(models / "out"), "--parts", "train"]
    for under, more, said in (
        (["--stage", "3"], ["--deepspeed", str(file)], "TrainingArguments(deepspeed=...) asks for another engine"),
        (["--stage", "3"], ["--fsdp", "full_shard"], "TrainingArguments(fsdp=...) asks for another engine"),
        (["--zero", str(file)], [], "gradient_clipping is 0.5, but max_grad_norm is 1.0"),
    ):
        for error in run_ranks_raises(2, run_script, [*words, *more], under):
            assert error.type_name == "ConfigError" and said in error.message and "\n" not in error.message


@pytest.fixture(scope="module")
def zero(models: Path) -> Path:
    file = models / "zero.toml"
    file.write_text('[zero]\nstage = 3\nbucket_bytes = 65536\n[zero.offload]\noptimizer = "host"\n')
    return file


def test_settings_of_a_file_train_alike(models: Path, stages: list[list[dict[str, Any]]], zero: Path) -> None:
    found = warm(2, models, "file", ["--zero", str(zero)], "--parts", "train")
    assert [one["train"] for one in found] == [one["train"] for one in stages[3]]


# a real torchrun: test_script.py too, and warm ranks have the environment it makes
@pytest.mark.parametrize("launcher", with_soak(["torchrun", "accelerate"], "torchrun"))
def test_launched_scripts_train_alike(
    launcher: str, models: Path, stages: list[list[dict[str, Any]]], zero: Path
) -> None:
    """torchrun with settings from a file and a script's path; accelerate launch with options and a module's name."""
    if launcher == "torchrun":
        words = [*TORCHRUN, "-m", "onefold.hf", "--zero", str(zero), MAIN]
    else:
        words = [*ACCELERATE, "-m", "onefold.hf", "--stage", "2", "-m", "main"]
    cwd = models if launcher == "torchrun" else SCRIPTS
    found = results([*words, "--parts", "train"], models, models / launcher, cwd)
    assert [one["train"] for one in found] == [one["train"] for one in stages[3]]
    assert found[0]["about"]["main"] == "__main__" and found[0]["about"]["ranks"] == 2
    assert found[0]["about"]["argv"][:2] == ["--parts", "train"]
    assert Path(found[0]["about"]["path"]).resolve() == SCRIPTS.resolve()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script was given"),
        (["--stage", "3"], "no script was given"),
        (["--stage", "5", MAIN], "stage=5 is unknown; use one of 0, 1, 2, 3"),
        (["--stage", "three", MAIN], "stage='three' is unknown"),
        (["--offload", "tape", MAIN], "'tape'"),
        (["--stagee", "3", MAIN], "unrecognized arguments: --stagee"),
        (["--mesh", "shard", MAIN], "--mesh 'shard' is not like replica=2,shard=4"),
        (["--mesh", "tp=2", MAIN], "'tp' is none of replica, shard, sequence"),
        (["--mesh", "shard=0", MAIN], "a size from 1 on"),
        (["nothing.py"], "nothing.py is no file"),
        (["--zero", "nothing.toml", MAIN], "--zero nothing.toml is not there"),
        (["--zero", "{bad}", MAIN], "unknown setting bucket_mb; known are activations, bucket_bytes"),
        (["--zero", "{table}", MAIN], "unexpected keyword argument 'place'"),
        (["--zero", "{ds}", MAIN], "zero_optimization.zenflow"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    from onefold.hf.launch_settings import parse

    files = {"bad": tmp_path / "bad.toml", "table": tmp_path / "table.toml", "ds": tmp_path / "ds.json"}
    files["bad"].write_text("bucket_mb = 3\n")
    files["table"].write_text('[offload]\nplace = "host"\n')
    files["ds"].write_text('{"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}')
    with pytest.raises(onefold.ConfigError) as caught:
        parse([word.format(**files) for word in words])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_ends_the_command_with_exit_code_2(tmp_path: Path) -> None:
    done = start(["-m", "onefold.hf", "--stage", "7", MAIN], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "onefold.hf: stage=7 is unknown; use one of 0, 1, 2, 3 or 'auto'\n"


def test_settings_come_from_options_before_the_file(tmp_path: Path) -> None:
    from onefold.hf.launch_settings import parse

    file = tmp_path / "zero.toml"
    file.write_text('stage = 3\nmethods = ["encode"]\n[precision]\ncompute = "bf16"\n')
    found = parse(["--stage", "1", "--zero", str(file), MAIN, "--stage", "0", "--zero", "x"])
    assert (found.zero.stage, found.zero.methods, found.arguments) == (1, ("encode",), ("--stage", "0", "--zero", "x"))
    assert found.zero.precision == onefold.Precision(compute="bf16")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    found = parse(["--zero", str(tmp_path / "ds.json"), "--offload", "host", "-m", "some.module", "-m", "x"])
    assert found.module and found.script == "some.module" and found.arguments == ("-m", "x")
    assert (found.zero.stage, found.zero.offload, found.zero.precision) == (2, "host", "fp32")
