"""step_in_backward=True: the same bits as step(), and no gradients in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import Precision
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.models import MODELS
from tests.parity.precision.test_bytes import DEPTH, PSI, SPLIT, WIDTH
from tests.parity.training import OPTIMIZERS, batch_for, same_bits

POLICIES: dict[str, Any] = {"fp32": "fp32", "bf16": "bf16", "split": SPLIT}


def train(model_name: str, stage: int, policy: str, inside: bool) -> list[torch.Tensor]:
    torch.manual_seed(1234)
    case = MODELS[model_name]
    model = onefold.shard(case.build(), stage=stage, precision=POLICIES[policy], bucket_bytes=64 << 10)
    cls, kwargs = OPTIMIZERS["adamw-fused"]
    adam = onefold.Optimizer(model, cls, step_in_backward=inside, **kwargs)
    for step in range(4):
        torch.manual_seed(step)
        case.loss(model, batch_for(step, 0, torch.distributed.get_rank()), step).backward()
        adam.step()
        adam.zero_grad()
        assert adam.stepped
    with onefold.full_parameters(model):
        return [p.detach().clone() for p in model.parameters()]


def compare(model_name: str, policy: str) -> list[str]:
    found = []
    reference = train(model_name, 0, policy, False)
    for stage in (0, 1, 2, 3):
        same = map(same_bits, train(model_name, stage, policy, True), reference)
        found += [f"stage {stage}: parameter {index}" for index, equal in enumerate(same) if not equal]
    return found


@pytest.mark.parametrize(("policy", "ranks"), thinned(POLICIES, [1, 2, 3]))
def test_it_ends_with_the_bits_of_an_ordinary_step(policy: str, ranks: int) -> None:
    assert run_ranks(ranks, compare, "gpt", policy) == [[]] * ranks


@pytest.mark.parametrize("model", ["skipping", "conv", "gpt-tied", "gpt-checkpoint", "odd"])
def test_it_works_with_unused_parameters_and_other_models(model: str) -> None:
    assert run_ranks(2, compare, model, "fp32") == [[], []]


def hold(stage: int, precision: Precision) -> onefold.MemoryReport:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    model = onefold.shard(model, stage=stage, precision=precision, bucket_bytes=1)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, step_in_backward=True)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).float().sum().backward()
        adam.step()
    return onefold.memory(model)


@pytest.mark.parametrize(("stage", "whole", "sharded"), [(1, 2, 10), (2, 2, 10), (3, 0, 12)])
def test_no_gradients_are_held(stage: int, whole: int, sharded: int) -> None:
    for report in run_ranks(2, hold, stage, SPLIT):
        assert report.gradients.measured == 0 == report.gradients.planned
        assert report.states == PSI * whole + PSI * sharded // 2 + 4 * DEPTH + (2 * DEPTH if stage == 3 else 0)


def misuse(how: str) -> None:
    precision = "fp16" if how == "fp16" else "fp32"
    model = onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=2, precision=precision)
    adam = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, step_in_backward=True)
    x = torch.ones(2, 8, requires_grad=True)
    if how == "accumulate":
        with onefold.accumulate(model):
            model(x).sum().backward()
    if how == "shared checkpoints":
        y = checkpoint(model[0], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)
        model[1](y).sum().backward()
    model(x).sum().backward()
    if how == "clip":
        adam.clip_grad_norm(1.0)
    if how == "two backwards":
        model(x).sum().backward()


@pytest.mark.parametrize(
    ("how", "error", "word"),
    [
        ("clip", "StateError", "nothing is left to clip"),
        ("accumulate", "StateError", "nothing can accumulate"),
        ("two backwards", "StateError", "before the next one"),
        ("fp16", "ConfigError", "train in bf16"),
        ("shared checkpoints", "StateError", "came after its unit was updated"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(how: str, error: str, word: str) -> None:
    for caught in run_ranks_raises(2, misuse, how):
        assert caught.type_name == error and word in caught.message
