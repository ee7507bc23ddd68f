"""A model of many small blocks: neighbours share a unit, and nothing but the number of messages changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.cost.layout import ParamInfo, plan_units
from tests.harness import run_ranks
from tests.models import Interleaved, SmallBlock
from tests.parity.training import same_bits

WIDTH, BLOCKS, STEPS = 8, 6, 3
BLOCK_BYTES = 4 * (64 + 64)  # a matrix and a bias, each padded to 64 elements


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def train_ddp() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Interleaved(WIDTH, BLOCKS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.module.named_parameters()}


def train(fields: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
    """Parameters after some steps; bytes sent in the last step, by purpose; elements by unit."""
    torch.manual_seed(0)
    inside = fields.pop("step_in_backward", False)
    model = onefold.shard(Interleaved(WIDTH, BLOCKS), timeout_s=20, **fields)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=inside)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = dict[str, int]()
    for (purpose, _), flow in onefold.traffic(model).flows.items():
        sent[purpose] = sent.get(purpose, 0) + flow.sent_bytes
    units = {row.unit: row.elements for row in onefold.placement(model).rows}
    with onefold.full_parameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}, sent, units


WAYS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "checkpoint": {"stage": 3, "activations": "checkpoint"},
    "every second": {"stage": 3, "activations": "checkpoint", "checkpoint_every": 2},
    "inside": {"stage": 3, "step_in_backward": True},
    "host": {"stage": 3, "offload": onefold.Offload(optimizer="host", parameters="host")},
    "two by two": {"stage": 3, "bucket_bytes": 2 * BLOCK_BYTES},
    "one by one": {"stage": 3, "units": SmallBlock},
}


def test_blocks_that_share_units_train_as_under_ddp_bit_for_bit() -> None:
    wanted = run_ranks(2, train_ddp)[0]
    for way, fields in WAYS.items():
        found = run_ranks(2, train, fields)
        for name, value in wanted.items():
            assert all(same_bits(params[name], value) for params, _, _ in found), (way, name)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_unit_of_several_blocks_is_gathered_at_the_first_and_freed_after_the_last(activations: str) -> None:
    """Were it freed in between, it would be gathered, and sent, once more for each block."""
    _, sent, units = run_ranks(2, train, {"stage": 3, "activations": activations, "bucket_bytes": 3 * BLOCK_BYTES})[0]
    assert list(units)[:2] == ["blocks.0…2", "blocks.3…5"]
    shared, others = (
        BLOCKS * BLOCK_BYTES // 2,
        2 * BLOCK_BYTES // 2,
    )  # bytes that a rank sends of blocks, and of the rest
    assert sent["gather-forward"] == shared + BLOCKS * others, "the layer between comes again after each block"
    assert sent["gather-backward"] == shared // 2 + others, "the last blocks stay unsharded from forward"


def second(name: str, numel: int) -> bool:
    return name == "blocks.1"


def names(fields: dict[str, Any]) -> list[str]:
    model = onefold.shard(Interleaved(WIDTH, BLOCKS), stage=3, **fields)
    return [row.unit for row in onefold.placement(model).rows if row.unit.startswith("blocks")]


def test_neighbours_share_a_unit_up_to_bucket_bytes_unless_units_are_named() -> None:
    each = [f"blocks.{number}" for number in range(BLOCKS)]
    for fields, wanted in [
        ({}, ["blocks.0…5"]),
        ({"bucket_bytes": 4 * BLOCK_BYTES}, ["blocks.0…2", "blocks.3…5"]),
        ({"bucket_bytes": 2 * BLOCK_BYTES - 1}, each),
        ({"prefetch": "auto", "live_bytes": 4 * BLOCK_BYTES}, ["blocks.0…1", "blocks.2…3", "blocks.4…5"]),
        ({"units": SmallBlock}, each),
        ({"keep_whole": second}, each),
    ]:
        assert run_ranks(1, names, fields) == [wanted], fields


def test_only_blocks_of_one_container_that_follow_one_another_share() -> None:
    def info(name: str, block: str = "", kind: str = "float32") -> ParamInfo:
        return ParamInfo(name, 64, 4, kind, block)

    params = [
        info("a.0.w", "a.0"), info("a.1.w", "a.1"), info("a.1.f", "a.1", "float32 frozen"), info("norm"),
        info("a.2.w", "a.2"), info("b.0.w", "b.0"), info("b.1.w", "b.1"),
    ]  # fmt: skip
    found = {unit.name: [slot.name for slot in unit.slots] for unit in plan_units(params, 2, 1 << 20)}
    assert found == {
        "a.0.w…": ["a.0.w", "a.1.w"],
        "a.1.f": ["a.1.f"],
        "norm": ["norm"],
        "a.2": ["a.2.w"],
        "b.0…1": ["b.0.w", "b.1.w"],
    }
