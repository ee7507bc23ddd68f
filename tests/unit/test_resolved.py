"""shard() looks at a model once, and what it decided is one frozen description of what was built."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.model.resolved import Resolved
from onefold.runtime.engine import engine_of
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier
from onefold.settings.zero import Zero
from tests.harness import run_ranks
from tests.models import Residual


def build() -> nn.Module:
    """Three blocks, a frozen layer and a head."""
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    return nn.Sequential(*(Residual(8) for _ in range(3)), frozen, nn.Linear(8, 8))


def questions(**fields: Any) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """How often shard() asks a user's functions about each module and each unit."""
    modules, kept, units = Counter[str](), Counter[str](), Counter[str]()

    def is_block(name: str, module: nn.Module) -> bool:
        modules[name] += 1
        return isinstance(module, Residual)

    def keeps_fp32(name: str, module: nn.Module) -> bool:
        kept[name] += 1
        return isinstance(module, nn.LayerNorm)

    def small(unit: str, elements: int) -> bool:
        units[unit] += 1
        return False

    onefold.init()
    precision = onefold.Precision(compute="bf16", keep_fp32=keeps_fp32)
    onefold.shard(build(), units=is_block, keep_whole=small, precision=precision, **fields)
    return modules, kept, units


def test_every_module_and_every_unit_is_asked_about_once():
    ways: dict[str, Any] = {"stage": 3, "activations": "checkpoint", "offload": "host"}
    for asked in run_ranks(2, questions, **ways)[0]:
        assert asked and set(asked.values()) == {1}, asked


def description(**fields: Any) -> tuple[Resolved, list[Any], list[str]]:
    """On a rank: what was decided, the placements of live units, and parameters that have a tensor of their own."""
    onefold.init()
    engine = engine_of(onefold.shard(build(), **fields))
    live = [(unit.layout, unit.placement, unit.dtypes.compute, unit.trained) for unit in engine.all_units]
    return dataclasses.replace(engine.resolved, tensor_shards={}), live, [name for name, _ in engine.frozen]


@pytest.mark.parametrize("stage", range(4))
def test_the_description_is_of_what_was_built(stage):
    resolved, live, frozen = run_ranks(2, description, stage=stage, precision="bf16")[1]
    built = [(u.layout, u.placement, u.dtype, u.trained) for u in resolved.units if u.flat]
    assert sorted(built, key=lambda row: not row[3]) == live  # the engine has frozen units last
    assert [name for name in ("3.weight", "3.bias") if name in resolved.replicated_frozen] == frozen
    assert frozen == ([] if stage == 3 else ["3.weight", "3.bias"])
    assert resolved.blocks == ("0", "1", "2") and resolved.settings.stage == stage


def test_what_is_automatic_is_decided_in_the_description():
    fields = {"stage": "auto", "offload": Offload(optimizer="auto", device_bytes=1 << 20)}
    for resolved, live, _ in run_ranks(2, description, **fields):
        assert resolved.settings.stage in (1, 2, 3) and f"stage {resolved.settings.stage}:" in resolved.why_at_shard
        assert {unit.placement.optimizer_tier for unit in resolved.units if unit.trained} == {Tier.HOST}
        assert "decides in the first step" in resolved.why and resolved.candidates == {0, 1}
        assert [row[1] for row in live if row[3]] == [unit.placement for unit in resolved.units if unit.trained]


def test_which_blocks_are_recomputed_follows_from_the_settings(resolved):
    def asked(**fields: Any) -> tuple[str, ...]:
        return dataclasses.replace(resolved, settings=Zero(**fields)).recomputed

    assert asked() == ()
    assert asked(activations="checkpoint") == asked(activations="auto") == ("0", "1", "2")
    assert asked(activations="checkpoint", checkpoint_every=2) == ("0", "2")


def test_the_description_cannot_be_changed(resolved):
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.why = "because"
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.units[0].trained = False


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return run_ranks(1, description)[0][0]
