"""`onefold train --weights`: a run that begins with the weights of a Hugging Face folder, and goes back to one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onefold.cli.main import main
from onefold.cli.train import TrainCommand
from onefold.train.run.data import Data, load_data, prepare
from onefold.train.run.metrics import Listener
from onefold.train.run.pretrained import fine_tuned, open_pretrained
from onefold.train.run.records import read_facts, read_metrics
from onefold.train.run.sampling import share
from onefold.train.run.settings import Settings
from onefold.train.run.start import train
from onefold.train.run.stop import Stop
from onefold.train.run.toml import with_values
from tests.harness import run_ranks
from tests.train.launched import curve
from tests.train.pooled import trained
from tests.train.test_bad_input import said_once

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SEQ, POSITIONS, VOCAB, RANKS = 16, 24, 300, 2
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS,
}  # fmt: skip
STEPS = {"steps": 3, "log_every": 1, "eval_every": 0, "eval_windows": 4, "micro_batch": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folders of weights, text, and runs; one of the folders is an export of a run from random values."""
    place = tmp_path_factory.mktemp("weights") / "here"
    (place / "runs").mkdir(parents=True)
    (place / "text.txt").write_text("".join(f"line {i} of a text that is easy to learn\n" for i in range(700)))
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=POSITIONS, vocab_size=VOCAB, bos_token_id=None, eos_token_id=None
    )
    made = {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    }
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, model in made.items():
        for param in model.parameters():  # norms and biases too are of the model's own
            torch.nn.init.normal_(param, std=0.2)
        model.save_pretrained(place / name, max_shard_size="30KB")  # several files, and their index
        tokenizer.save(str(place / name / "tokenizer.json"))
    out = place / "runs" / "scratch"
    trained(RANKS, out, data={"data": str(place / "text.txt")}, steps=STEPS, model={"seq": SEQ})
    assert main(["export", str(out), str(place / "ours")]) == 0
    return place


def settings_of(place: Path, kind: str, out: Path, **groups: Any) -> Settings:
    """What `onefold train --weights` makes of its flags."""
    usual = with_values(Settings(), fine_tuned(place / kind), "--weights")
    given: dict[str, Any] = {
        "model": {"weights": str(place / kind), "seq": SEQ},
        "data": {"data": str(place / "text.txt"), "cache": str(place / "cache")},
        "steps": STEPS, "checkpoints": {"save_every": 2}, "output": {"out": str(out)},
    }  # fmt: skip
    return with_values(with_values(usual, given, "test"), groups, "test")


def one_rank(settings: Settings) -> Any:
    from onefold.train.run.transformers_model import make_model

    return train(settings, Stop(), Listener(), make_model)


def run(place: Path, kind: str, name: str, **groups: dict[str, Any]) -> Path:
    """The folder of a run that began with these weights; a run of that name is made once."""
    out = place / "runs" / name
    if not out.exists():
        settings = settings_of(place, kind, out, plan=name == "llama", **groups)
        settings.check(RANKS)
        run_ranks(RANKS, one_rank, settings)
    return out


def data_of(settings: Settings) -> Data:
    return load_data(settings.data, SEQ, prepare(settings.data).entry)


@torch.no_grad()
def plain_loss(folder: Path, data: Data, windows: list[int]) -> float:
    """What transformers, in one process, says of these windows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs, targets = data.batch(windows)
    return float(F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1).double(), targets.flatten()))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "ours"])
def test_the_first_loss_is_that_of_transformers_in_one_process(place, kind):
    out = run(place, kind, kind)
    settings = settings_of(place, kind, out)
    data = data_of(settings)
    mine: Iterator[range] = (share(0, ranks=RANKS, rank=rank, micro_batch=2, micro=0) for rank in range(RANKS))
    windows = [data.windows.sample(settings.steps.seed, number) for numbers in mine for number in numbers]
    assert read_metrics(out)[0]["loss"] == pytest.approx(plain_loss(place / kind, data, windows), rel=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "ours"])
def test_what_is_exported_is_read_by_from_pretrained_and_says_the_last_loss(place, kind, tmp_path, capsys):
    out = run(place, kind, kind)
    assert main(["export", str(out), str(tmp_path / "weights")]) == 0
    assert capsys.readouterr().out.startswith("step 3: ")
    data = data_of(settings_of(place, kind, out))
    last = read_metrics(out)[-1]["val_loss"]
    evaluated = data.windows.evaluated(4)
    found = plain_loss(tmp_path / "weights", data, evaluated)
    assert found == pytest.approx(last, rel=1e-6)
    assert found != pytest.approx(plain_loss(place / kind, data, evaluated), rel=1e-5), "it was trained"
    again = open_pretrained(tmp_path / "weights")
    assert again.built_in == (kind != "llama") and again.shape == open_pretrained(place / kind).shape
    wanted = "bytes" if kind == "ours" else (place / kind / "tokenizer.json").read_text()
    assert (again.tokenizer if kind == "ours" else Path(str(again.tokenizer)).read_text()) == wanted


def test_losses_of_a_model_of_transformers_are_the_same_bits_at_every_stage(place):
    runs = [run(place, "llama", f"stage{stage}", zero={"stage": stage}) for stage in (0, 1, 2)]
    assert [curve(out) for out in runs] == [curve(run(place, "llama", "llama"))] * 3
    assert [read_facts(out)["stage"] for out in runs] == [0, 1, 2]


def test_a_model_of_transformers_goes_on_where_it_was_interrupted(place, tmp_path):
    whole, part = run(place, "llama", "llama"), tmp_path / "part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step-00000003")
    run_ranks(RANKS, one_rank, settings_of(place, "llama", part, checkpoints={"resume": True}))
    assert curve(part) == curve(whole)


def test_the_plan_knows_a_model_of_transformers(place):
    facts, row = read_facts(run(place, "llama", "llama")), read_metrics(run(place, "llama", "llama"))[-1]
    assert facts["model"]["class"] == "LlamaForCausalLM" and facts["model"]["weights"] == str(place / "llama")
    numel = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(place / "llama").parameters())
    assert facts["model"]["parameters"] == numel
    assert row["traffic"]["reduce"] == facts["plan"]["traffic"]["reduce"] > 0
    assert row["memory"]["peak"] == pytest.approx(facts["plan"]["peak_bytes"], rel=0.1)


def test_the_run_has_the_folders_tokenizer_and_a_rate_for_fine_tuning_unless_they_are_given(place, tmp_path):
    found = TrainCommand.defaults(["--weights", str(place / "gpt2")])
    assert (found.adam.lr, found.adam.min_lr) == (1e-4, 1e-5)
    assert found.data.tokenizer == str(place / "gpt2" / "tokenizer.json")
    (tmp_path / "x.toml").write_text(f'[model]\nweights = "{place}/ours"\n[adam]\nlr = 0.5\n')
    found = TrainCommand.defaults(["--config", str(tmp_path / "x.toml")])
    assert (found.adam.lr, found.adam.min_lr, found.data.tokenizer) == (0.5, 1e-5, "bytes")


def folder(tmp_path: Path, config: Any = None, *names: str) -> str:
    (tmp_path / "w").mkdir()
    if config is not None:
        (tmp_path / "w" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in names:
        (tmp_path / "w" / name).touch()
    return str(tmp_path / "w")


LLAMA = {"model_type": "llama", **SIZES}
LARGE = {**LLAMA, "hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 3, "head_dim": 1 << 15}
TENSORS = "model.safetensors"


@pytest.mark.parametrize(
    ("config", "names", "flags", "said"),
    [
        (None, (), (), "has no config.json; give a Hugging Face folder, or what onefold export made of a run"),
        (None, ("facts.json",), (), "it is a run: onefold export"),
        ("{", (), (), "is no JSON"),
        ({}, (), (), "names no model_type"),
        ({"model_type": "opt"}, (), (), "is a 'opt', which is unknown here; onefold train knows gpt2, llama, mistral"),
        ({"model_type": "deepseek"}, (), (), "is a 'deepseek', whose class is code in its folder, which is not run"),
        ({"model_type": "llama"}, (TENSORS,), (), "has no 'intermediate_size', which model_type 'llama' needs"),
        (LLAMA, (), (), "has no .safetensors file; is the download complete?"),
        (LLAMA, ("pytorch_model.bin",), (), "has pytorch_model.bin and no .safetensors file"),
        (LLAMA | {"quantization_config": {}}, (TENSORS,), (), "is quantized"),
        (LLAMA, (TENSORS,), ("--layers", "3"), "--layers 3 is for a new model"),
        (LLAMA, (TENSORS,), ("--model", "gpt2"), "--model gpt2 is for a new model"),
        (LLAMA, (TENSORS,), ("--seq", "25"), "--seq 25 is too long: the model in"),
        (LLAMA, (TENSORS,), ("--mesh", "shard=1,tp=2"), "tp splits the built-in GPT, and --weights"),
        (LLAMA, (TENSORS,), ("--mesh", "sequence=2"), "sequence splits the built-in GPT"),
        (LLAMA, (TENSORS,), (), "has no tokenizer.json; give --tokenizer"),
        (LLAMA | {"vocab_size": 200}, (TENSORS,), ("--tokenizer", "bytes"), "the tokens go up to 255, and the"),
        (LARGE, (TENSORS,), ("--tokenizer", "bytes"), "stage 3 does not fit: the plan for 773,173,673,984"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_line_before_any_rank_starts(tmp_path, capsys, config, names, flags, said):
    flags = ("--weights", folder(tmp_path, config, *names), "--ranks", "2", *flags)
    assert main(["train", "--out", str(tmp_path / "run"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in said_once(err)
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_model_of_transformers_is_not_sampled_and_the_way_out_is_said(place, capsys):
    out = run(place, "llama", "llama")
    assert main(["sample", str(out)]) == 2
    assert "trained a LlamaForCausalLM of transformers" in said_once(capsys.readouterr().err)


def test_weights_that_lack_a_tensor_are_refused_by_its_name(place, tmp_path):
    for kind, gone in (("gpt2", "transformer.h.1.ln_1.bias"), ("llama", "model.norm.weight")):
        shutil.copytree(place / kind, tmp_path / kind)
        model = transformers.AutoModelForCausalLM.from_pretrained(place / kind)
        state = {name: value for name, value in model.state_dict().items() if name != gone}
        for file in (tmp_path / kind).glob("*.safetensors*"):
            file.unlink()
        model.save_pretrained(tmp_path / kind, state_dict=state)
        with pytest.raises(Exception, match=f"has no .*{gone}"):
            run_ranks(1, one_rank, settings_of(place, str(tmp_path / kind), tmp_path / "run"))
