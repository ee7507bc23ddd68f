"""After a call that cannot work the model, and the next one, stay usable."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from tests.harness import fresh_ranks, run_ranks
from tests.models import DIM, Stack, blocks
from tests.parity.stage3.compare import batch

TRANSFORMS = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


def transformed() -> list[str]:
    """What each transform raised, with a training step behind it."""
    model = onefold.shard(Stack(blocks(2), nn.Linear(DIM, 3)), stage=3, timeout_s=10.0)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    said = []
    for transform in TRANSFORMS.values():
        with pytest.raises(onefold.StateError) as caught:
            transform(model, batch(0))
        said.append(str(caught.value))
        loss = model(batch(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    return said


def test_a_model_is_usable_after_a_transform_of_torch_func_was_refused() -> None:
    for said in run_ranks(2, transformed):
        assert len(said) == len(TRANSFORMS) and all("torch.func" in text and "stage 2" in text for text in said)


def transformed_below() -> list[bool]:
    """Stage 2: whether each transform gives what it gives of the plain model."""
    torch.manual_seed(1)
    plain = Stack(blocks(2), nn.Linear(DIM, 3))
    want = [transform(plain, batch(0)) for transform in list(TRANSFORMS.values())[2:]]
    model = onefold.shard(plain, stage=2, timeout_s=10.0)
    have = [transform(model, batch(0)) for transform in list(TRANSFORMS.values())[2:]]
    tangent = TRANSFORMS["jvp"](model, batch(0))[1]
    return [torch.equal(a, b) for a, b in zip(have, want, strict=True)] + [bool(torch.isfinite(tangent).all())]


def test_transforms_of_torch_func_work_at_stage_2() -> None:
    assert run_ranks(2, transformed_below) == [[True] * 3] * 2


class NothingReceived(TorchDispatchMode):
    """Inside, a message that is to be received fails before it begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "recv" in str(func):
            raise ArithmeticError("not received")
        return func(*args, **(kwargs or {}))


def sharded_again() -> bool:
    model = onefold.shard(nn.Linear(DIM, DIM), stage=3, timeout_s=5.0)
    with pytest.raises(ArithmeticError), NothingReceived():
        model(batch(0))
    del model
    gc.collect()
    other = onefold.shard(nn.Linear(DIM, DIM), stage=3, timeout_s=5.0)
    loss = other(batch(0)).sum()
    loss.backward()
    return bool(torch.isfinite(loss))


def test_shard_after_a_model_that_failed_to_receive_does_not_hang() -> None:
    for outcome in fresh_ranks(2, sharded_again, timeout_s=40):
        assert (outcome.exitcode, outcome.value) == (0, True), outcome.error
