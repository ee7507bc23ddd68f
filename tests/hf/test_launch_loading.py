"""from_pretrained leaves the values in their files until the model is sharded, and then gives what it always gives."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import fresh_ranks, run_ranks, run_ranks_raises
from tests.harness.resident import KEPT_BYTES, resident_bytes

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip
DECODER = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {  # the model that is saved, and the one that is read
    "tied": ("Qwen2ForCausalLM", "Qwen2Config", DECODER | {"tie_word_embeddings": True}, "AutoModelForCausalLM"),
    "new head": ("LlamaForCausalLM", "LlamaConfig", DECODER, "AutoModelForSequenceClassification"),
    "experts": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4}, "AutoModelForCausalLM"),
    "encoder": ("BertForMaskedLM", "BertConfig", SMALL, "AutoModelForSequenceClassification"),
    "saved buffers": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "AutoModelForImageClassification",
    ),
}  # fmt: skip
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
LARGE = SHAPE | {"num_key_value_heads": 8, "vocab_size": 2048, "max_position_embeddings": 64}


def save(folder: Path, model: str, config: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    getattr(transformers, model)(getattr(transformers, config)(**fields)).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    for name, (model, config, fields, _) in CASES.items():
        save(folder / name, model, config, fields)
    return folder


def full_state(model: nn.Module) -> dict[str, Tensor]:
    with onefold.full_parameters(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def differing(plain: nn.Module, state: dict[str, Tensor], buffers: dict[str, Tensor]) -> list[str]:
    """Names of parameters and buffers that are not what from_pretrained gives, or of another dtype."""
    wanted = {**plain.state_dict(), **dict(plain.named_buffers())}
    found = {**state, **buffers}
    assert wanted.keys() == found.keys()
    return [n for n, t in wanted.items() if t.dtype is not found[n].dtype or not torch.equal(t, found[n])]


def read_both(folder: str, dtype: torch.dtype | None, stage: int) -> dict[str, tuple[list[str], bool, bool]]:
    """By case: what differs, whether all that the files have was deferred, and whether random numbers were."""
    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    found = {}
    for case, (_, _, _, auto) in CASES.items():
        cls = getattr(transformers, auto)
        torch.manual_seed(1)
        plain, missing = cls.from_pretrained(f"{folder}/{case}", dtype=dtype, output_loading_info=True)
        drawn = torch.rand(())
        torch.manual_seed(1)
        model = from_pretrained(cls, f"{folder}/{case}", dtype=dtype)
        same_random = bool(torch.rand(()) == drawn)
        real = {name for name, param in model.named_parameters() if not param.is_meta}
        if dtype is not None:  # trained parameters are fp32: read as a model that is called before it is sharded
            for param in model.parameters():
                param.requires_grad_(False)
        onefold.shard(model, stage=stage, bucket_bytes=4 << 10, init=deferred_values(model))
        state = full_state(model)
        left = differing(plain, state, dict(model.named_buffers()))
        same_config = getattr(model, "generation_config", None) == getattr(plain, "generation_config", None)
        assert same_config and model.config.to_dict() == plain.config.to_dict() and not model.training
        found[case] = (left, real == set(missing["missing_keys"]), same_random)
    return found


@pytest.mark.parametrize(("dtype", "stage"), [(None, 3), (torch.bfloat16, 3), (None, 1)])
def test_what_is_sharded_is_what_from_pretrained_gives(saved: Path, dtype: torch.dtype | None, stage: int) -> None:
    for found in run_ranks(2, read_both, str(saved), dtype, stage):
        assert found == {case: ([], True, True) for case in CASES}


def use_before_sharding(folder: str) -> dict[str, bool]:
    """What scripts do with a model before they train it."""
    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    cls, path = transformers.AutoModelForCausalLM, f"{folder}/tied"
    ids = torch.arange(8)[None]
    plain = cls.from_pretrained(path)
    found = {}
    with torch.no_grad():
        found["called"] = torch.equal(from_pretrained(cls, path)(ids).logits, plain(ids).logits)
        twin = copy.deepcopy(from_pretrained(cls, path)).to("cpu")
        found["copied and moved"] = torch.equal(twin(ids).logits, plain(ids).logits)
    narrow = onefold.shard(
        halves := from_pretrained(cls, path).to(torch.bfloat16).requires_grad_(False),
        stage=3,
        init=deferred_values(halves),
    )
    expected = cls.from_pretrained(path).to(torch.bfloat16).state_dict()
    found["cast"] = all(torch.equal(value, expected[n]) for n, value in full_state(narrow).items())
    other = cls.from_config(plain.config).state_dict()
    loaded = from_pretrained(cls, path)
    loaded.load_state_dict(other)
    found["loaded"] = all(torch.equal(value, other[name]) for name, value in loaded.state_dict().items())
    grown = []
    for model in (plain, from_pretrained(cls, path)):
        torch.manual_seed(2)
        model.resize_token_embeddings(70)
        grown.append(model)
    onefold.shard(grown[1], stage=3, init=deferred_values(grown[1]))
    state = full_state(grown[1])
    found["resized"] = all(torch.equal(value, state[name]) for name, value in grown[0].state_dict().items())
    return found | written_and_read(path)


def written_and_read(path: str) -> dict[str, bool]:
    """A parameter whose values are read or written is read from its file then; the others stay there."""
    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = from_pretrained(transformers.AutoModelForCausalLM, path)
    with torch.no_grad():
        for one in (plain, model):
            one.model.norm.weight.mul_(3)
            one.lm_head.weight.data[0] = 7  # tied
            one.model.layers[0].mlp.up_proj.weight = nn.Parameter(one.model.layers[1].mlp.up_proj.weight.clone())
    written = sum(not param.is_meta for param in model.parameters())
    read = torch.equal(
        model.model.layers[0].mlp.down_proj.weight.sum(), plain.model.layers[0].mlp.down_proj.weight.sum()
    )
    onefold.shard(model, stage=3, init=deferred_values(model))
    state = full_state(model)
    kept = all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    return {"written": kept and written == 4, "read": read}


def adapted(folder: str, dora: bool) -> tuple[int, int, bool]:
    """Adapters over a model whose values are in files: how many parameters of the base, and of the adapters, have no
    values yet; and whether logits are those of the plain model."""
    from peft import LoraConfig, get_peft_model

    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    cls, path, ids = transformers.AutoModelForCausalLM, f"{folder}/tied", torch.arange(8)[None]
    models = []
    for model in (cls.from_pretrained(path), from_pretrained(cls, path)):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False)
        models.append(get_peft_model(model, config))
    names = [name for name, param in models[1].named_parameters() if param.is_meta]
    adapters = [name for name in names if "lora" in name]
    onefold.shard(models[1], stage=3, init=deferred_values(models[1]))
    with torch.no_grad():
        same = torch.equal(models[0](ids).logits, models[1](ids).logits)
    return len(names) - len(adapters), len(adapters), same


def test_adapters_are_made_over_a_base_that_stays_in_its_files(saved: Path) -> None:
    pytest.importorskip("peft")
    every = sum(1 for _ in transformers.AutoModelForCausalLM.from_pretrained(saved / "tied").parameters())
    assert run_ranks(2, adapted, str(saved), False) == [(every, 0, True)] * 2
    assert run_ranks(2, adapted, str(saved), True) == [(every - 4, 0, True)] * 2  # DoRA takes the norms of its layers


def test_a_model_can_be_used_and_changed_before_it_is_sharded(saved: Path) -> None:
    for found in run_ranks(2, use_before_sharding, str(saved)):
        assert found == dict.fromkeys(
            ("called", "copied and moved", "cast", "loaded", "resized", "written", "read"), True
        )


def shard_with_another_shape(folder: str) -> None:
    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    model = from_pretrained(transformers.AutoModelForCausalLM, f"{folder}/tied")
    values = deferred_values(model)
    model.model.norm.weight = nn.Parameter(torch.empty(48, device="meta"))
    onefold.shard(model, stage=3, init=values)


def test_a_parameter_that_was_given_another_shape_is_named(saved: Path) -> None:
    for error in run_ranks_raises(2, shard_with_another_shape, str(saved)):
        assert error.type_name == "ModelError" and "model.norm.weight has shape (48,)" in error.message


def read_bytes() -> int:
    """Bytes that this process has read from files, cached ones too."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def load_large(folder: str) -> tuple[int, int, int]:
    """Bytes of the model, those that this rank read of its file, and those that were resident at most."""
    from onefold.integrations.transformers_loading import deferred_values, from_pretrained

    onefold.init()
    cls = transformers.AutoModelForCausalLM
    for name in ("tied", "large"):  # the first brings all that is imported and allocated once
        before, read = resident_bytes("VmRSS"), read_bytes()
        model = from_pretrained(cls, f"{folder}/{name}")
        whole = sum(param.nbytes for param in model.parameters())
        onefold.shard(model, stage=3, bucket_bytes=4 << 20, init=deferred_values(model))
    return whole, read_bytes() - read, resident_bytes("VmHWM") - before


def test_each_rank_reads_its_part_and_never_holds_the_whole_model(saved: Path) -> None:
    """At most the shards and a few units of 4 MiB are in memory, and half of the file is read on each of two ranks."""
    save(saved / "large", "LlamaForCausalLM", "LlamaConfig", LARGE)
    file = os.path.getsize(saved / "large" / "model.safetensors")
    for outcome in fresh_ranks(2, load_large, str(saved)):
        assert outcome.error is None, outcome.error
        whole, read, most = outcome.value
        assert whole > 100 << 20 and whole <= file
        assert most <= whole / 2 + 5 * (4 << 20) + KEPT_BYTES, f"{most >> 20} of {whole >> 20} MiB"
        assert read <= file / 2 + (2 << 20), f"{read >> 20} of {file >> 20} MiB"
