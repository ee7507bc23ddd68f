"""PEFT's own calls on a sharded model: each works, or raises an error of Onefold's that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from tests.harness import run_ranks

pytest.importorskip("peft")

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

from tests.peft.adapters import adapted, base, config, differing, logits, sharded, tokens, train, weights


def ready(stage: int, **options: Any) -> tuple[Any, onefold.Optimizer]:
    model, optimizer = sharded(adapted(**options), stage, precision="bf16")
    train(model, optimizer, range(2))
    return model, optimizer


def trained_ones(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def saved(stage: int, folder: str) -> None:
    model, optimizer = ready(stage)
    masters = onefold.full_state_dict(model, only="trainable")  # of the base nothing is gathered
    assert (dist.get_rank() == 0) == bool(masters)
    if masters:
        assert masters.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
        model.save_pretrained(f"{folder}/masters", state_dict=masters)
    with onefold.full_parameters(model):  # in the dtype that computes
        assert {value.dtype for value in get_peft_model_state_dict(model).values()} == {torch.bfloat16}
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/bf16")
    dist.barrier()
    again = PeftModel.from_pretrained(base(), f"{folder}/masters", is_trainable=True)
    assert not differing(trained_ones(again), weights(model))
    rounded = PeftModel.from_pretrained(base(), f"{folder}/bf16", is_trainable=True)
    assert not differing({n: p.bfloat16() for n, p in weights(model).items()},
                         {n: p.bfloat16() for n, p in trained_ones(rounded).items()})  # fmt: skip
    other, _ = sharded(again, 5 - stage, precision="bf16")
    assert torch.equal(logits(other), logits(model))
    before = weights(model)
    train(model, optimizer, range(2, 4))
    assert differing(weights(model), before)
    with onefold.full_parameters(model, write=True):
        model.load_adapter(f"{folder}/masters", "default", is_trainable=True, autocast_adapter_dtype=False)
    assert not differing(weights(model), before)
    train(model, optimizer, range(2, 4))
    state = get_peft_model_state_dict(model, state_dict=before)
    with onefold.full_parameters(model, write=True):
        set_peft_model_state_dict(model, state)
    assert not differing(weights(model), before)
    train(model, optimizer, range(2, 4))
    model.load_state_dict(before, strict=False)  # without full_parameters
    assert not differing(weights(model), before)
    with pytest.raises(onefold.ConfigError, match="only='frozen' is unknown; use 'trainable'"):
        onefold.full_state_dict(model, only="frozen")
    named = {"base_model.model.lm_head.weight"}
    assert onefold.full_state_dict(model, only=named).keys() == (named if dist.get_rank() == 0 else set())
    with pytest.raises(onefold.ConfigError, match="only= names 'head', which is no parameter of the model"):
        onefold.full_state_dict(model, only={"head"})


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_saved_and_loaded_by_pefts_own_calls(stage: int, tmp_path: Path) -> None:
    run_ranks(2, saved, stage, str(tmp_path))


def saved_head(stage: int, folder: str) -> None:
    model, _ = ready(stage, modules_to_save=["lm_head"])
    masters = weights(model)
    with onefold.full_parameters(model):  # PEFT asks the head for its state dict
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=masters)
    dist.barrier()
    again = PeftModel.from_pretrained(base(), folder, is_trainable=True)
    assert any("lm_head" in name for name in masters) and not differing(trained_ones(again), masters)


@pytest.mark.parametrize("stage", [2, 3])
def test_modules_to_save_are_saved_with_the_adapters(stage: int, tmp_path: Path) -> None:
    run_ranks(2, saved_head, stage, str(tmp_path))


def switched_off(stage: int) -> None:
    """disable_adapter(), set_adapter() and merging, beside a model that is not sharded."""
    model, _ = sharded(adapted(), stage)
    plain = adapted()
    assert torch.equal(logits(model), logits(plain))
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), logits(plain))
    plain.merge_adapter()
    with onefold.full_parameters(model, write=True):
        model.merge_adapter()
    assert torch.equal(logits(model), logits(plain))
    plain.unmerge_adapter()
    with onefold.full_parameters(model, write=True):
        model.unmerge_adapter()
    assert torch.equal(logits(model), logits(plain))
    onefold.unshard(model)
    model.add_adapter("second", config(r=2))
    model.set_adapter("second")
    model, optimizer = sharded(model, stage)
    train(model, optimizer, range(1))
    model.set_adapter("default")  # which is frozen in this shard(), and unfrozen by set_adapter()
    plain.load_state_dict(onefold.full_state_dict(model, every_rank=True), strict=False)
    assert torch.equal(logits(model), logits(plain))
    train(model, optimizer, range(1, 2))
    onefold.unshard(model)
    merged = model.merge_and_unload()
    assert type(merged) is type(base())


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_switched_off_switched_over_and_merged(stage: int) -> None:
    run_ranks(2, switched_off, stage)


def merged(stage: int, folder: str) -> None:
    """merge_and_unload() inside full_parameters, to save a model that needs no PEFT; sharded as it is, it evaluates."""
    model, optimizer = sharded(adapted(), stage)
    train(model, optimizer, range(2))
    plain = adapted()
    plain.load_state_dict(onefold.full_state_dict(model, every_rank=True))
    with onefold.full_parameters(model, write=True):
        unloaded = model.merge_and_unload()
        if dist.get_rank() == 0:
            unloaded.save_pretrained(folder)
    dist.barrier()
    expected = logits(plain.merge_and_unload())
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(type(base()).from_pretrained(folder)), expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_merged_model_is_saved_by_transformers(stage: int, tmp_path: Path) -> None:
    run_ranks(2, merged, stage, str(tmp_path))


def refused(folder: str) -> dict[str, str]:
    """What calls raise at stage 3 that need all of the model, or change it."""

    def added(model: Any) -> None:
        model.add_adapter("second", config(r=2))
        model(input_ids=tokens(0))

    def unloaded(model: Any) -> None:
        with onefold.full_parameters(model, write=True):
            model.merge_and_unload()
        model(input_ids=tokens(0))

    calls: dict[str, Callable[[Any], Any]] = {
        "save_pretrained": lambda model: model.save_pretrained(folder),
        "get_peft_model_state_dict": get_peft_model_state_dict,
        "merge_adapter": lambda model: model.merge_adapter(),
        "merge_and_unload": lambda model: model.merge_and_unload(),
        "add_adapter": added,
        "merge_and_unload, sharded": unloaded,
        "half": lambda model: model.half(),
    }
    found = {}
    for name, call in calls.items():
        model, _ = sharded(adapted(), 3)
        try:
            call(model)
        except onefold.StateError as error:
            found[name] = str(error)
    return found


def test_a_call_that_needs_the_whole_model_raises_and_names_the_remedy(tmp_path: Path) -> None:
    for found in run_ranks(2, refused, str(tmp_path)):
        remedies = {
            "save_pretrained": "onefold.full_state_dict(model)",
            "get_peft_model_state_dict": "onefold.full_state_dict(model)",
            "merge_adapter": "onefold.full_parameters(model) around it (with write=True",
            "merge_and_unload": "onefold.full_parameters(model) around it (with write=True",
            "add_adapter": "after onefold.unshard(model)",
            "merge_and_unload, sharded": "after onefold.unshard(model)",
            "half": "before onefold.shard()",
        }
        assert [name for name in remedies if remedies[name] not in found.get(name, "did not raise")] == [], found
        assert not any("\n" in text for text in found.values())
