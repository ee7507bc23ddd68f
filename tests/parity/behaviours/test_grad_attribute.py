"""What users find in `.grad`: the mean at stage 0, a placeholder that raises where gradients are spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import onefold
from tests.harness import run_ranks
from tests.parity.behaviours.engines import Ddp, Engine, Staged, bare, batch, check, compare, mlp, on_rank, params_of


def change_in_place(engine: Engine) -> dict[str, Any]:
    """Also between two backwards of one step."""
    model = engine.wrap(mlp())
    adam = engine.optimizer(model)
    seen = []
    for step in range(3):
        for micro in range(2):
            model(batch(10 * step + micro, engine.rank)).square().mean().backward()
            seen.append([p.grad.clone() for p in model.parameters()])
            for param in model.parameters():
                param.grad.mul_(0.5)
            bare(model)[0].weight.grad[1:3] = 0.25
        adam.step()
        adam.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return {"params": params_of(model), "seen": seen}


@pytest.mark.parametrize("ranks", [2, 3])
def test_at_stage_0_grad_is_ddps_and_may_be_changed_in_place(ranks: int) -> None:
    for results in run_ranks(ranks, on_rank, change_in_place, [0, "ddp"], {}):
        compare(results[0], results["ddp"], False, f"{ranks} ranks")


def grad_bits() -> tuple[list[Any], list[Any]]:
    grads = []
    for engine in (Staged(0), Ddp("ddp")):
        torch.manual_seed(2)
        model = engine.wrap(mlp())
        model(batch(0, engine.rank)).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    return grads[0], grads[1]


def test_at_stage_0_grad_has_ddps_bits_on_two_ranks() -> None:
    for ours, theirs in run_ranks(2, grad_bits):
        compare(ours, theirs, True, "grad")


def use_placeholder(stage: int) -> list[str]:
    model = Staged(stage).wrap(mlp())
    optimizer = Staged(stage).optimizer(model)
    model(batch(0, 0)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None and param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert "each rank holds its shard" in repr(param.grad)
    grad = model[0].weight.grad
    raised = []
    uses: list[Any] = [
        lambda: grad + 1,
        lambda: grad.mul_(2),
        lambda: grad.norm(),
        lambda: grad.sum().item(),
        lambda: grad.clone(),
        lambda: torch.zeros_like(model[0].weight).copy_(grad),
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    ]
    for use in uses:
        try:
            use()
            raised.append("nothing")
        except onefold.StateError:
            raised.append("StateError")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    optimizer.step()  # and still works
    return raised


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_at_stages_1_to_3_grad_has_a_shape_and_raises_when_used(stage: int) -> None:
    for raised in run_ranks(2, use_placeholder, stage):
        assert raised == ["StateError"] * 8


def replace_grad(engine: Engine, between: bool) -> dict[str, Any]:
    """A replaced .grad is not what the optimizer reads, so it must not pass in silence."""
    model = engine.wrap(mlp())
    sgd = engine.optimizer(model, torch.optim.SGD)
    model(batch(0, engine.rank)).square().mean().backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    try:
        if between:
            model(batch(1, engine.rank)).square().mean().backward()
        sgd.step()
    except onefold.StateError as error:
        return {"error": "was replaced after backward" in str(error)}
    return {"error": None}


@pytest.mark.parametrize("between", [False, True])
def test_a_replaced_grad_raises(between: bool) -> None:
    everyone = check(2, replace_grad, between=between)
    assert everyone[0][0]["error"] is True
