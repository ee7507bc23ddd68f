"""onefold.plan for modules, and stage="auto"."""

from __future__ import annotations

import dataclasses
import os
from functools import cache

import pytest
import torch
from torch import nn

import onefold
from onefold.cost.hardware import TABLE, hardware
from onefold.cost.machine import here
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError, ModelError
from onefold.planner.measure import measured
from onefold.runtime.engine import engine_of
from onefold.train.run.model import GPT
from tests.harness import run_ranks
from tests.models import Routed

SHAPE = Shape(layers=2, hidden=64, heads=2, seq=32, vocab=64)


def tokens(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch, SHAPE.seq, dtype=torch.long), torch.zeros(batch, SHAPE.seq, dtype=torch.long)


@cache
def planned() -> tuple[GPT, dict[str, torch.Tensor], onefold.Plan]:
    """A model, its values before it was planned, and the plan."""
    model = GPT(SHAPE)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    return model, before, onefold.plan(model, tokens(), ranks=4, hardware="laptop")


def test_a_module_is_planned_and_left_as_it_was():
    model, before, found = planned()
    assert [row.stage for row in found.stages] == [0, 1, 2, 3]
    states = [row.states_bytes for row in found.stages]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4
    assert all(row.persistent_bytes <= row.peak_bytes for row in found.stages)
    assert found.stages[3].traffic_bytes > found.stages[2].traffic_bytes
    for row in found.stages:  # fp32: four bytes each, but for a byte per flag
        sent = [message for message in row.messages if message.purpose != "used-flags"]
        assert 4 * row.traffic_elements == sum(message.bytes for message in sent)
    ranked = {choice.label: choice for choice in found.recommendations}
    assert all(ranked[row.label].peak_bytes == row.peak_bytes for row in found.stages)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    onefold.init()
    onefold.shard(model, stage=3)  # it was not sharded, nor hooked


def test_a_plan_with_offload_auto_keeps_parameters_on_the_host_where_the_device_is_too_small():
    small = dataclasses.replace(hardware("laptop"), memory_bytes=900_000)
    fields = {"hardware": small, "offload": "auto", "bucket_bytes": 1 << 14}
    found = onefold.plan(GPT(SHAPE), tokens(), ranks=2, **fields).stages
    assert found[2].label == "stage 2, optimizer on host" and found[3].label == "stage 3, all on host"
    assert found[3].params_bytes < 1000, "placeholders"
    assert found[3].host_bytes - found[2].host_bytes >= found[2].params_bytes // 2


def test_micro_batches_and_checkpointing_change_a_plan():
    _, _, plain = planned()
    several = onefold.plan(GPT(SHAPE), tokens(), ranks=4, hardware="laptop", micro_batches=2, activations="checkpoint")

    def sent(found: onefold.Plan, stage: int, purpose: str) -> int:
        return next(message.bytes for message in found.stages[stage].messages if message.purpose == purpose)

    assert sent(several, 1, "reduce") == sent(plain, 1, "reduce")  # whole gradients are reduced once
    assert sent(several, 3, "reduce") == 2 * sent(plain, 3, "reduce")
    assert several.stages[3].activations_bytes < plain.stages[3].activations_bytes
    with pytest.raises(ConfigError, match="stage"):
        onefold.plan(GPT(SHAPE), tokens(), ranks=2, stage=3)


def test_a_model_on_meta_is_planned_too():
    with torch.device("meta"):
        model = GPT(SHAPE)
    found = onefold.plan(model, tokens(), ranks=2, hardware="h200", precision="bf16")
    assert found.stages[3].states_bytes < found.stages[0].states_bytes
    assert "split master" in found.precision  # what shard() would decide on a GPU


def test_a_larger_batch_needs_more_and_checkpointing_less():
    from onefold.cost.states import StateCost
    from onefold.observe.rehearsal import rehearse
    from onefold.settings.zero import Zero

    shape = Shape(layers=4, hidden=64, heads=2, seq=64, vocab=64)

    def activations(batch: int, policy: str) -> int:
        rows = torch.zeros(batch, shape.seq, dtype=torch.long)
        run = rehearse(GPT(shape), (rows, rows), Zero(activations=policy), StateCost(8), ranks=2)
        return run.peak["activations"] + run.peak["checkpoints"]

    kept = activations(4, "keep")
    assert kept == pytest.approx(2 * activations(2, "keep"), rel=0.05)
    assert activations(4, "checkpoint") < kept / 2


def test_a_model_that_decides_by_values_says_so_and_is_planned_with_them():
    torch.manual_seed(0)
    model, sample = Routed(), torch.randn(16, 8)
    with pytest.raises(ModelError, match="values=True"):
        onefold.plan(model, sample, ranks=2, hardware="laptop")
    found = onefold.plan(model, sample, ranks=2, hardware="laptop", values=True)
    assert found.stages[3].states_bytes < found.stages[2].states_bytes < found.stages[0].states_bytes


def test_unknown_optimizers_hardware_and_samples_are_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="adamw"):
        onefold.plan(model, torch.zeros(1, 8), ranks=2, hardware="laptop", optimizer="adamx")
    with pytest.raises(ConfigError, match="v100-32"):
        onefold.plan(model, torch.zeros(1, 8), ranks=2, hardware="cray")
    with pytest.raises(ConfigError, match="ranks"):
        onefold.plan(model, torch.zeros(1, 8), ranks=0, hardware="laptop")


def test_the_table_is_sane():
    for row in TABLE.values():
        assert 0 < row.efficiency <= 1 and row.flops > 1e10 and row.memory_bytes >= 16e9
        assert row.link(row.node_ranks, row.node_ranks) == row.node_link  # inside a node
        assert row.link(64 * row.node_ranks, row.node_ranks) <= row.node_link
        assert row.link(64, 1) <= row.nic_rate or row.node_ranks == 1 or row.nics >= row.node_ranks


def test_this_machine_is_measured_in_seconds():
    found = measured(torch.device("cpu"))
    assert 1e8 < found.flops < 1e15 and 1e8 < found.node_link < 1e12 and 1e8 < found.memory_rate < 1e13
    assert found.memory_bytes > 1 << 30


def chosen_stage(memory_bytes: int) -> tuple[int | str, str]:
    """On a rank of so many on its machine that each has about this much of its memory."""
    onefold.init()
    host = here(torch.device("cpu")).host_bytes
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(host // memory_bytes)
    try:
        model = onefold.shard(GPT(SHAPE), stage="auto", bucket_bytes=1 << 14)
        return engine_of(model).resolved.settings.stage, str(onefold.placement(model))
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


@pytest.mark.parametrize("states, stage", [(3.0, 1), (0.6, 2), (0.42, 3), (0.01, 3)])
def test_stage_auto_takes_the_first_that_leaves_room(states, stage):
    """Memory in units of all states (16 bytes per parameter): stage 1 needs 0.63 of them at N = 4, 2 needs 0.44 …"""
    numel = sum(param.numel() for param in GPT(SHAPE).parameters())
    found = run_ranks(4, chosen_stage, int(16 * numel * states / 0.7))
    assert {row[0] for row in found} == {stage}
    assert f"stage {stage}:" in found[0][1]


def test_stage_auto_decides_alike_on_ranks_with_different_memory():
    numel = sum(param.numel() for param in GPT(SHAPE).parameters())

    def sizes(rank: int) -> int:
        return int(16 * numel * (3.0 if rank == 0 else 0.55) / 0.7)

    found = run_ranks(2, uneven, [sizes(0), sizes(1)])
    assert len({row[0] for row in found}) == 1


def uneven(sizes: list[int]) -> tuple[int | str, str]:
    import torch.distributed as dist

    onefold.init()
    return chosen_stage(sizes[dist.get_rank()])


def test_here_knows_the_machine():
    assert here(torch.device("cpu")).memory_bytes > 1 << 28
    assert hardware("H200").memory_bytes == 141_000_000_000
