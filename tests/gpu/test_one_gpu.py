"""One GPU, a world of one: every stage trains as plain PyTorch does. Also runs as python -m tests.gpu.test_one_gpu."""

from __future__ import annotations

from unittest import TestCase

import pytest
import torch
from torch import nn

import onefold
from tests.models import GPT, GPT_VOCAB

pytestmark = pytest.mark.gpu
STEPS = 5


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, GPT_VOCAB, (4, 9), generator=generator).cuda() for _ in range(STEPS)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def fresh_model() -> nn.Module:
    torch.manual_seed(0)
    model = GPT().cuda()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def plain() -> dict[str, torch.Tensor]:
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for tokens in batches():
        loss_of(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def sharded(stage: int) -> dict[str, torch.Tensor]:
    onefold.init()
    model = onefold.shard(fresh_model(), stage=stage, bucket_bytes=16 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for tokens in batches():
        loss_of(model, tokens).backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert onefold.memory(model).parameters.measured == onefold.memory(model).parameters.planned
    with onefold.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_stage_trains_as_plain_pytorch_on_one_gpu() -> None:
    reference = plain()
    first = sharded(0)
    for name, value in first.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)
    for stage in (1, 2, 3):
        trained = sharded(stage)
        assert all(torch.equal(trained[name], value) for name, value in first.items()), f"stage {stage}"


def test_a_model_on_meta_is_built_on_the_gpu() -> None:
    onefold.init()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    onefold.shard(model, stage=3)
    assert next(model.parameters()).is_cuda
    assert torch.isfinite(model(torch.ones(2, 8, device="cuda"))).all()


def test_a_model_that_was_left_on_the_cpu_is_noticed_and_no_other() -> None:
    onefold.init()
    with TestCase().assertLogs("onefold", "WARNING") as said:
        onefold.shard(nn.Linear(8, 8), stage=2)
    assert len(said.output) == 1 and "call model.cuda() before shard()" in said.output[0]
    with torch.device("meta"):
        blank = nn.Linear(8, 8)
    with TestCase().assertNoLogs("onefold", "WARNING"):
        onefold.shard(nn.Linear(8, 8).cuda(), stage=2)
        onefold.shard(blank, stage=2, device="cpu")
        onefold.plan(nn.Linear(8, 8), torch.zeros(2, 8), ranks=2)


if __name__ == "__main__":
    for test in (
        test_every_stage_trains_as_plain_pytorch_on_one_gpu,
        test_a_model_on_meta_is_built_on_the_gpu,
        test_a_model_that_was_left_on_the_cpu_is_noticed_and_no_other,
    ):
        test()
        print(f"{test.__name__}: passed")
