"""optimizer.step(closure), as torch's trainers and tutorials write it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM = 16


def with_closure(stage: int, precision: str) -> None:
    def built() -> tuple[Stack, onefold.Optimizer]:
        torch.manual_seed(5)
        model = onefold.shard(Stack(blocks(2, DIM)), stage=stage, precision=precision)
        return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.05)

    (model, optimizer), (twin, other) = built(), built()
    calls: list[int] = []
    for step in range(3):
        x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(step + torch.distributed.get_rank()))

        def closure(x: Tensor = x) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            optimizer.backward(loss)
            return loss

        with torch.no_grad():  # as some trainers call step()
            returned = optimizer.step(closure)
        other.zero_grad()
        loss = twin(x).float().square().mean()
        other.backward(loss)
        assert other.step() is None
        assert torch.equal(returned, loss)
    assert len(calls) == 3
    ours, theirs = onefold.full_state_dict(model), onefold.full_state_dict(twin)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_is_returned(stage: int, precision: str) -> None:
    run_ranks(2, with_closure, stage, precision)
