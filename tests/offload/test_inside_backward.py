"""step_in_backward with offload: the same bits, a bounded number of gradients on the host, updates beside backward."""

from __future__ import annotations

import pytest
import torch

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import MODELS
from tests.offload.runs import PRECISIONS, TIERS, offload_of, stages_of
from tests.parity.training import batch_for

CASES = [(tiers, stage) for tiers in TIERS for stage in stages_of(tiers)]


def trained(stage: int, precision, offload, inside: bool, model: str = "gpt", **fields) -> dict:
    onefold.init()
    torch.manual_seed(1)
    case = MODELS[model]
    fields = {"bucket_bytes": 64 << 10, **fields}
    sharded = onefold.shard(case.build(), stage=stage, precision=precision, offload=offload, **fields)
    adam = onefold.Optimizer(sharded, torch.optim.AdamW, lr=1e-2, step_in_backward=inside)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0 / (1 + step))  # each update has its own rate
    for step in range(4):
        torch.manual_seed(step)
        case.loss(sharded, batch_for(step, 0, torch.distributed.get_rank()), step).backward()
        adam.step()
        adam.zero_grad()
        scheduler.step()
    return onefold.full_state_dict(sharded)


def compare(stage: int, precision, offload, model: str = "gpt", **fields) -> list[str]:
    plain = trained(stage, precision, None, False, model, **fields)
    moved = trained(stage, precision, offload, True, model, **fields)
    return [name for name in plain if not torch.equal(plain[name], moved[name])]


@pytest.mark.parametrize(("case", "precision", "ranks"), thinned(CASES, ("fp32", "bf16", "split"), (1, 2)))
def test_updates_beside_backward_give_the_same_bits(case: tuple[str, int], precision: str, ranks: int, tmp_path):
    tiers, stage = case
    found = run_ranks(ranks, compare, stage, PRECISIONS[precision], offload_of(tiers, str(tmp_path)))
    assert found == [[]] * ranks


@pytest.mark.parametrize(("tiers", "ranks"), thinned((None, *TIERS), (1, 2)))
def test_units_that_are_updated_before_their_block_is_left_give_the_same_bits(tiers, ranks: int, tmp_path) -> None:
    """A block of several units that is computed again stays whole until backward has left all of it."""
    offload = offload_of(tiers, str(tmp_path)) if tiers else None
    found = run_ranks(ranks, compare, 3, "bf16", offload, "gpt", activations="checkpoint", bucket_bytes=1 << 10)
    assert found == [[]] * ranks


IN_MEMORY = [tiers for tiers in TIERS if TIERS[tiers].get("parameters") != "disk"]


@pytest.mark.parametrize(("tiers", "ranks"), thinned((None, *IN_MEMORY), (1, 2)))
def test_units_that_nobody_used_in_a_step_give_the_same_bits_later(tiers, ranks: int, tmp_path) -> None:
    offload = offload_of(tiers, str(tmp_path)) if tiers else None
    assert run_ranks(ranks, compare, 3, "bf16", offload, "skipping", bucket_bytes=1 << 10) == [[]] * ranks


def waiting_bytes() -> tuple[int, int]:
    onefold.init()
    model = onefold.shard(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40))), stage=3, precision="bf16", offload="host",
        bucket_bytes=8 << 10,
    )  # fmt: skip
    adam = onefold.Optimizer(model, torch.optim.AdamW, step_in_backward=True)
    for _ in range(3):
        model(torch.randn(2, 64).bfloat16()).sum().backward()
        adam.step()
    staged = sum(buffer.numel() for buffer in engine_of(model).tiers.host.staging.buffers())
    return staged, sum(unit.layout.shard_numel * 2 for unit in engine_of(model).units)


def test_few_gradients_wait_on_the_host_inside_backward() -> None:
    for staged, gradients in run_ranks(2, waiting_bytes):
        assert staged < gradients / 2
