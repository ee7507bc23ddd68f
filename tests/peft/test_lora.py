"""LoRA and DoRA train over a sharded, frozen base as they do over a plain one: to the same bits at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import onefold
from tests.harness import run_ranks
from tests.harness.grids import with_soak

pytest.importorskip("peft")

from tests.peft.adapters import (
    adapted,
    base,
    config,
    differing,
    logits,
    sharded,
    train,
    trained,
    unlike_stage_0,
    weights,
)

Build = Callable[[], Any]


def checkpointed() -> Any:
    """As transformers' users recompute blocks under adapters: inputs of the frozen embedding must require grad."""
    model = adapted()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def reentrant() -> Any:
    model = adapted()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def two_adapters() -> Any:
    """The second of two is trained; the first is frozen, and stays as it is."""
    model = adapted()
    model.add_adapter("second", config(r=2))
    model.set_adapter("second")
    return model


def in_bf16() -> Any:
    """A base that was loaded in bf16, with the fp32 adapters that PEFT makes over it."""
    return adapted(model=base().to(torch.bfloat16))


MODELS: dict[str, tuple[Build, dict[str, Any]]] = {
    "LoRA": (adapted, {}),
    "LoRA on GPT-2": (lambda: adapted("gpt2"), {}),
    "DoRA": (lambda: adapted(use_dora=True), {}),
    "DoRA on GPT-2, bf16": (lambda: adapted("gpt2", use_dora=True), {"precision": "bf16"}),
    "LoRA, bf16": (adapted, {"precision": "bf16"}),
    "LoRA over a base in bf16": (in_bf16, {}),
    "head trained too": (lambda: adapted(modules_to_save=["lm_head"]), {"precision": "bf16"}),
    "two adapters": (two_adapters, {}),
    "checkpointed by transformers": (checkpointed, {}),
    "checkpointed by transformers, reentrant": (reentrant, {}),
    "checkpointed": (adapted, {"activations": "checkpoint"}),
    "all linear layers": (lambda: adapted(target_modules="all-linear"), {}),
}


def stages_differ(name: str) -> dict[int, list[str]]:
    return unlike_stage_0(*MODELS[name])


# what is left to --soak is held in "two adapters", "DoRA on GPT-2, bf16", and "head trained too", which is in bf16
@pytest.mark.parametrize("name", with_soak(MODELS, "LoRA", "DoRA", "LoRA, bf16"))
def test_adapters_train_to_the_same_bits_at_every_stage(name: str) -> None:
    assert run_ranks(2, stages_differ, name) == [{}, {}]


def differs_from_ddp(name: str) -> list[str]:
    build, _ = MODELS[name]
    plain = build()
    parallel = DistributedDataParallel(plain)
    losses = train(parallel, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2), range(3))
    theirs = {f"loss {step}": loss for step, loss in enumerate(losses)}
    theirs |= {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    theirs["logits"] = logits(plain)
    ours = trained(build, 3, {})
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6)]


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on GPT-2"])
def test_adapters_train_as_under_ddp(name: str) -> None:
    assert run_ranks(2, differs_from_ddp, name) == [[], []]


def moved_base(stage: int) -> list[str]:
    """What of the frozen base is not as it was after training."""
    model, optimizer = sharded(adapted(), stage)
    train(model, optimizer, range(2))
    plain = dict(adapted().named_parameters())
    with onefold.full_parameters(model):
        return [name for name, p in model.named_parameters() if not p.requires_grad and not p.equal(plain[name])]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_base_stays_as_it_is(stage: int) -> None:
    assert run_ranks(2, moved_base, stage) == [[], []]


def offloaded(tier: str, folder: str) -> list[str]:
    kept = onefold.Offload(parameters=tier, optimizer=tier, path=folder if tier == "disk" else None)
    first = trained(adapted, 3, {"precision": "bf16"})
    model, optimizer = sharded(adapted(), 3, precision="bf16", offload=kept)
    train(model, optimizer, range(3))
    report = onefold.memory(model)
    assert report.parameters.measured == report.parameters.planned
    frozen = [row for row in onefold.placement(model).rows if row.optimizer == "frozen"]
    assert frozen and all(tier in row.parameters for row in frozen)
    ours = weights(model)
    return differing(ours, {name: first[name] for name in ours})


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_frozen_units_may_rest_on_the_host_or_on_disk(tier: str, tmp_path: Any) -> None:
    assert run_ranks(2, offloaded, tier, str(tmp_path)) == [[], []]
