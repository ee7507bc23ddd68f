"""Models that do not train (a reference, a reward model, a teacher) are sharded without master or optimizer state."""

from __future__ import annotations

import copy
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
