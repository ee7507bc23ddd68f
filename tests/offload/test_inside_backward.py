"""step_in_backward with offload: the same bits, a bounded number of gradients on the host, updates beside backward."""

from __future__ import annotations

import pytest
import torch

import onefold
from onefold.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.offload.runs import PRECISIONS, TIERS, offload_of, stages_of
from tests.parity.models import MODELS
from tests.parity.training import batch_for

CASES = [(tiers, stage) for tiers in TIERS for stage in stages_of(tiers)]


def trained(stage: int, precision, offload, inside: bool) -> dict:
    onefold.init()
    torch.manual_seed(1)
    case = MODELS["gpt"]
    model = onefold.shard(case.build(), stage=stage, precision=precision, offload=offload, bucket_bytes=64 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=inside)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0 / (1 + step))  # each update has its own rate
    for step in range(4):
        torch.manual_seed(step)
        case.loss(model, batch_for(step, 0, torch.distributed.get_rank()), step).backward()
        adam.step()
        adam.zero_grad()
        scheduler.step()
    return onefold.full_state_dict(model)


def compare(stage: int, precision, offload) -> list[str]:
    plain, moved = trained(stage, precision, None, inside=False), trained(stage, precision, offload, inside=True)
    return [name for name in plain if not torch.equal(plain[name], moved[name])]


@pytest.mark.parametrize(("case", "precision", "ranks"), thinned(CASES, ("fp32", "bf16", "split"), (1, 2), share=3))
def test_updates_beside_backward_give_the_same_bits(case: tuple[str, int], precision: str, ranks: int, tmp_path):
    tiers, stage = case
    found = run_ranks(ranks, compare, stage, PRECISIONS[precision], offload_of(tiers, str(tmp_path)))
    assert found == [[]] * ranks


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
