"""Well-known models by name and by config.json: the parameters they are known to have, and one line for what is not."""

import json
from pathlib import Path

import pytest
import torch

from onefold.cli.main import main
from onefold.cli.subject import hugging_face
from onefold.cost.activations import flops_per_sample
from onefold.cost.families import FAMILIES, from_config, model_shape
from onefold.errors import ConfigError

PUBLISHED = {  # by the models' cards
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296, "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "deepseek-moe-16b": 16_375_728_128, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "llama": {}, "mistral": {"tie_word_embeddings": True}, "qwen2": {"head_dim": None},
    "qwen3": {"attention_bias": False}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}, "gemma": {}, "gemma2": {},
}  # fmt: skip


def written(folder: Path, **fields) -> Path:
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


def test_every_name_has_the_parameters_that_were_published():
    assert {name: model_shape(name).numel for name in PUBLISHED} == PUBLISHED
    assert set(FAMILIES) <= set(PUBLISHED)


def test_a_model_of_experts_computes_with_those_that_a_token_uses():
    """Published as active: 12.9B of 46.7B, 3.3B of 30.5B, 2.8B of 16.4B, with embeddings, which are looked up."""
    for name, billions in (("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("deepseek-moe-16b", 2.8)):
        shape = model_shape(name)
        assert (shape.matmul_numel + shape.vocab * shape.hidden) / 1e9 == pytest.approx(billions, rel=0.03)
        assert flops_per_sample(shape, "keep") > 6 * shape.seq * shape.matmul_numel


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_has_the_parameters_that_transformers_makes_of_it(kind, tmp_path):
    folder = written(tmp_path, model_type=kind, **SMALL | CONFIGS[kind])
    with torch.device("meta"):
        model = hugging_face(folder)
    shape = from_config(folder)
    assert shape.numel == sum(param.numel() for param in model.parameters())
    assert shape.seq == 64 and model_shape(str(folder / "config.json")) == shape


def test_tensor_and_pipeline_parallel_ranks_have_their_part():
    shape = model_shape("llama-3-8b")
    whole, cut = shape.numel, sum(part.numel for part in shape.parts(8))
    assert whole / 8 < cut < whole / 8 * 1.01  # norms are on every rank
    assert sum(part.numel for part in shape.parts(1, 4)) == pytest.approx(whole / 4, rel=0.4)  # and both embeddings


def test_a_plan_by_name_and_by_config_is_the_same(tmp_path, capsys):
    fields = SMALL | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "head_dim": None,
    }  # fmt: skip
    folder = written(tmp_path, model_type="mistral", **fields)
    plans = []
    for model in ("Mistral-7B", str(folder)):
        assert main(["plan", "--model", model, "--ranks", "8", "--batch", "1", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0].pop("model") == "Mistral-7B" and plans[1].pop("model") == str(folder)
    assert plans[0] == plans[1] and plans[0]["parameters"] == PUBLISHED["mistral-7b"]
    states = [row["states_bytes"] for row in plans[0]["stages"]]
    assert states[0] == pytest.approx(14 * PUBLISHED["mistral-7b"], rel=1e-3)  # with a split master
    assert states[3] == pytest.approx(states[0] / 8, rel=1e-2)


BAD = {
    "no such family": ('{"model_type": "frobnicator"}', "has no formula here"),
    "no type": ("{}", "names no model_type"),
    "no json": ("not json", "config.json"),
    "a field too few": ('{"model_type": "llama", "hidden_size": 64}', "has no 'intermediate_size'"),
    "a field that is no number": (json.dumps({"model_type": "llama", **SMALL, "hidden_size": "64"}), "hidden='64'"),
    "a huge number": (json.dumps({"model_type": "llama", **SMALL, "num_hidden_layers": 10**30}), "up to 10,000"),
    "heads in no groups": (json.dumps({"model_type": "llama", **SMALL, "num_key_value_heads": 3}), "kv_heads=3"),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD.keys())
def test_a_config_that_is_no_model_is_one_line(content, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--ranks", "2"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "config.json" in err and said in err


def test_a_folder_of_the_hubs_cache_is_the_model_that_was_downloaded_last(tmp_path):
    folder = tmp_path / "models--org--small"
    for commit, hidden in (("0a" * 20, 64), ("1b" * 20, 128)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        written(folder / "snapshots" / commit, model_type="llama", **SMALL | {"hidden_size": hidden})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1b" * 20)
    assert model_shape(str(folder)) == model_shape(str(folder / "snapshots" / ("1b" * 20)))
    assert model_shape(str(folder)).hidden == 128
    (folder / "refs" / "main").write_text("gone")
    with pytest.raises(ConfigError, match=r"snapshots/gone/config.json is not there"):
        model_shape(str(folder))


@pytest.mark.parametrize(("given", "meant"), [("llama3-8b", "llama-3-8b"), ("Qwen2.5-7", "qwen2.5-7b")])
def test_a_name_that_is_nearly_right_is_told_the_right_one(given, meant, capsys):
    assert main(["plan", "--model", given, "--ranks", "2"]) == 2
    err = capsys.readouterr().err
    assert f"is unknown; did you mean {meant}? Or use a config.json" in err and err.count("\n") == 1


def test_what_is_known_by_its_shape_alone_is_not_built(capsys):
    assert main(["plan", "--model", "/nowhere/config.json", "--ranks", "2"]) == 2
    assert main(["verify", "--model", "llama-3-8b"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "is not there" in said[0] and "to build it give --config" in said[1]
