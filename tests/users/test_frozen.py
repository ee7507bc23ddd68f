"""Models that do not train (a reference, a reward model, a teacher) are sharded without master or optimizer state."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS = 16, 2


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(3, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM))


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a frozen model gives, and the gradient that goes through it."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.float().square().sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        return [output.detach(), x.grad, model(x)]


def frozen_from_the_start(stage: int, precision: str, folder: str) -> None:
    plain = built().requires_grad_(False)
    model = onefold.shard(copy.deepcopy(plain), stage=stage, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).to(dtype)
    for _ in range(2):
        for ours, theirs in zip(outcome(model, x), outcome(copy.deepcopy(plain).to(dtype), x), strict=True):
            assert torch.equal(ours, theirs)
    memory, every = onefold.memory(model), sum(p.numel() for p in plain.parameters()) * dtype.itemsize
    assert memory.optimizer.measured == memory.gradients.measured == 0
    assert memory.optimizer.planned == memory.gradients.planned == 0
    assert memory.parameters.measured == memory.parameters.planned
    assert memory.parameters.measured < (0.75 * every if stage == 3 else every + 1)
    for row in onefold.placement(model).rows:
        assert (row.optimizer, row.gradients) == ("frozen", "frozen")
        assert row.parameters == ("sharded" if stage == 3 else "replicated")
    with pytest.raises(onefold.OptimizerError, match="no parameter that requires grad"):
        onefold.Optimizer(model, torch.optim.AdamW)
    onefold.save(folder, model, step=0)
    other = onefold.shard(Stack(blocks(3, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM)).requires_grad_(False), stage=0)
    onefold.load(folder, other)
    whole = onefold.full_state_dict(model)
    for name, value in (other.to(torch.float32).state_dict() if whole else {}).items():
        assert torch.equal(value, plain.state_dict()[name].to(dtype).float())
        assert torch.equal(whole[name], plain.state_dict()[name].to(dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_model_computes_like_plain_torch_and_has_parameters_only(
    stage: int, precision: str, tmp_path: Path
) -> None:
    run_ranks(RANKS, frozen_from_the_start, stage, precision, str(tmp_path / "run"))


def frozen_later(stage: int, tier: str | None) -> None:
    """A model that has been trained becomes a reference; later it trains again."""
    offload = onefold.Offload(optimizer=tier) if tier else None
    model = onefold.shard(built(), stage=stage, precision="bf16", offload=offload)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.01)
    x = torch.randn(3, DIM).bfloat16()

    def step() -> None:
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model.requires_grad_(False)
    with torch.no_grad():
        model(x)
    full = onefold.memory(model)
    assert full.optimizer.measured + full.host > 0  # an optimizer keeps its state, as torch's do
    del optimizer
    gc.collect()
    with torch.no_grad():
        before = model(x)
    freed = onefold.memory(model)
    assert freed.optimizer.measured == freed.optimizer.planned == freed.gradients.measured == 0
    assert not any(row.measured for row in freed.elsewhere if row.state == "optimizer")
    assert not any(row.planned for row in freed.elsewhere if row.state == "optimizer")
    whole = onefold.full_state_dict(model)
    through = x.clone().requires_grad_()
    model(through).float().sum().backward()
    assert torch.equal(model(x), before)
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.head.bias.fill_(0.25)
    model.requires_grad_(True)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    assert onefold.memory(model).optimizer.measured + onefold.memory(model).host > 0
    again = onefold.full_state_dict(model)
    for name, value in again.items():
        assert torch.equal(value, torch.full_like(value, 0.25) if name == "head.bias" else whole[name])
    for _ in range(2):
        step()
    moved = onefold.full_state_dict(model)
    for name, value in moved.items():  # less than bf16 would show: the masters are fp32 again
        assert not torch.equal(value, again[name])
        assert torch.allclose(value, again[name], atol=3e-4)


@pytest.mark.parametrize("stage, tier", [(0, None), (1, None), (2, "host"), (3, None), (3, "host")])
def test_freezing_all_frees_master_and_state_once_the_optimizer_is_gone(stage: int, tier: str | None) -> None:
    run_ranks(RANKS, frozen_later, stage, tier)
