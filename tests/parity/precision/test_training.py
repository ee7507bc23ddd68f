"""16 bits with an fp32 master follow fp32; 16 bits alone stall on the same task, which is why the master exists."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import onefold
from onefold import Precision
from tests.harness import run_ranks
from tests.models import MODELS, Point
from tests.parity.training import same_bits

STEPS = [80, pytest.param(200, marks=pytest.mark.soak)]
BAND = 0.03  # of the fp32 loss, for the mean of the last 20 steps


def text(step: int) -> Tensor:
    """A sequence that can be learnt: each token is twice the one before plus one, with a start of its own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    rows = [torch.randint(0, 31, (4,), generator=generator)]
    for _ in range(12):
        rows.append((2 * rows[-1] + 1) % 31)
    return torch.stack(rows, dim=1)


def learn(precision: str | Precision, lr: float, steps: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = onefold.shard(MODELS["gpt"].build(), stage=2, precision=precision, bucket_bytes=32 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(steps):
        tokens = text(step)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        adam.backward(loss)
        adam.clip_grad_norm(1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    with onefold.full_parameters(model):
        return losses, [p.detach().clone() for p in model.parameters()]


def end_of(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


@cache
def learnt(precision: str | Precision, steps: int) -> tuple[list[float], list[Tensor]]:
    return run_ranks(2, learn, precision, 3e-3, steps, timeout_s=300)[0]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(Precision(compute="bf16", master="fp32"), id="bf16"),
        pytest.param("fp16", marks=pytest.mark.soak),
    ],
)
def test_16_bits_follow_fp32_until_the_task_is_learnt(precision: str | Precision, steps: int) -> None:
    in_fp32, losses = learnt("fp32", steps)[0], learnt(precision, steps)[0]
    assert in_fp32[0] > 3 and end_of(in_fp32) < 1.5, "the task was not learnt, the test proves nothing"
    assert abs(end_of(losses) - end_of(in_fp32)) < BAND * end_of(in_fp32[:40]), (end_of(losses), end_of(in_fp32))


@pytest.mark.soak  # over a few steps: test_a_split_master_trains_to_the_bits_of_a_plain_one
def test_split_and_plain_masters_agree_bit_for_bit_over_200_steps() -> None:
    plain, parts = (learnt(Precision(compute="bf16", master=master), 200) for master in ("fp32", "split"))
    assert plain[0] == parts[0] and all(map(same_bits, plain[1], parts[1]))


def walk(with_master: bool, dtype: str) -> float:
    """How far it is from its goal after 200 steps of 1e-3, with our master, or updated in 16 bits by torch itself."""
    model = Point()
    if with_master:
        model = onefold.shard(model, stage=2, precision=dtype)
        sgd = onefold.Optimizer(model, torch.optim.Adam, lr=1e-3)
        backward = sgd.backward
    else:
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
        sgd = torch.optim.Adam(model.parameters(), lr=1e-3 if dtype == "bf16" else 2e-4)
        backward = Tensor.backward
    for _ in range(200):
        backward(model())
        sgd.step()
        sgd.zero_grad()
    return abs(model.point.mean().item() - 1.1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_small_updates_vanish_in_16_bits_and_not_in_the_master(dtype: str) -> None:
    assert run_ranks(2, walk, True, dtype)[0] < 0.01
    assert run_ranks(2, walk, False, dtype)[0] > 0.05
