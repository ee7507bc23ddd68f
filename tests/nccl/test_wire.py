"""The sums that NCCL ranks make of known gradients have the bits that gloo ranks make of them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from tests.harness import device, run_ranks
from tests.models import Weighed
from tests.nccl.ranks import MARKS, RANKS, run_nccl

pytestmark = MARKS
SIZES = (1, 63, 1000, 4099)
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": onefold.Precision(compute="bf16", wire="bf16", grad="fp32", master="fp32"),
    "bf16, gradients rounded": onefold.Precision(compute="bf16", wire="bf16", master="fp32"),
    "bf16, split": onefold.Precision(compute="bf16", wire="bf16", master="split"),
    "fp16": onefold.Precision(compute="fp16", wire="fp16", grad="fp32", master="fp32"),
    "bf16, sent as fp32": onefold.Precision(compute="bf16", wire="fp32", grad="fp32", master="fp32"),
}
SUMMED_BY_NCCL = ("fp32", "bf16, sent as fp32")


def reduced(precision: str, stage: int) -> str:
    """On a rank: a digest of parameters from which the mean gradient was subtracted, and of its norm.

    The gradient of a weighted sum is the weights, on every device: what differs can only be the reduction.
    """
    torch.manual_seed(0)
    model = onefold.shard(
        Weighed(SIZES).to(device()), stage=stage, precision=PRECISIONS[precision], bucket_bytes=1 << 11
    )
    optimizer = onefold.Optimizer(
        model, torch.optim.SGD, lr=1.0, loss_scale=onefold.LossScale(initial=4.0) if precision == "fp16" else None
    )
    said = hashlib.sha256()
    for step in range(2):
        dice = torch.Generator().manual_seed(100 * step + dist.get_rank())
        scale = 2.0 ** torch.randint(-6, 6, (1,), generator=dice).item()  # so that rounding and order show
        weights = [torch.randn(size, generator=dice).bfloat16().float() * scale for size in SIZES]
        optimizer.backward(model([weight.to(device()) for weight in weights]))
        optimizer.step()
        optimizer.zero_grad()
    for value in onefold.full_state_dict(model).values():
        said.update(value.float().cpu().numpy().tobytes())
    return said.hexdigest() if dist.get_rank() == 0 else ""


def reduced_at(stages: tuple[int, ...]) -> dict[str, str]:
    return {f"{precision}, stage {stage}": reduced(precision, stage) for precision in PRECISIONS for stage in stages}


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_over_nccl_have_the_bits_of_sums_over_gloo(ranks: int) -> None:
    """Of gradients that travel in 16 bits; wider ones are summed by NCCL, in its own order, alike at all stages."""
    stages = (0, 2, 3)
    over_gloo, over_nccl = run_ranks(ranks, reduced_at, stages)[0], run_nccl(ranks, reduced_at, stages)[0]
    for precision in PRECISIONS:
        digests = [{found[f"{precision}, stage {stage}"] for stage in stages} for found in (over_gloo, over_nccl)]
        assert [len(one) for one in digests] == [1, 1], precision
        assert digests[0] == digests[1] or precision in SUMMED_BY_NCCL, precision
