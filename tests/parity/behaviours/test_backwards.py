"""Every way to call backward: twice, non-scalar, in checkpoints, under autocast, of a gradient, and one that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import CheckpointedTwice, Mined
from tests.parity.behaviours.engines import DIM, STAGES, Engine, Staged, bare, batch, check, mlp, params_of


def backward_repeated_forward(model: nn.Module, engine: Engine, step: int) -> None:
    outputs = [model(batch(step + 10 * i, engine.rank)) for i in range(3)]
    sum(out.square().mean() for out in outputs).backward()


def backward_non_scalar(model: nn.Module, engine: Engine, step: int) -> None:
    out = model(batch(step, engine.rank))
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))


def backward_several(model: nn.Module, engine: Engine, step: int) -> None:
    for i in range(3):
        model(batch(step + 10 * i, engine.rank)).square().mean().backward()


def backward_several_after_forwards(model: nn.Module, engine: Engine, step: int) -> None:
    losses = [model(batch(step + 10 * i, engine.rank)).square().mean() for i in range(2)]
    for loss in losses:
        loss.backward()


def backward_retained(model: nn.Module, engine: Engine, step: int) -> None:
    loss = model(batch(step, engine.rank)).square().mean()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def backward_autocast(model: nn.Module, engine: Engine, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch(step, engine.rank))
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()


def backward_penalty(model: nn.Module, engine: Engine, step: int) -> None:
    x = batch(step, engine.rank).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + slope.square().sum()).backward()


def backward_asked_for(model: nn.Module, engine: Engine, step: int) -> None:
    """Gradients asked for by autograd.grad are the caller's own; where values are whole, on one rank if it likes."""
    loss = model(batch(step, engine.rank)).square().mean()
    if engine.rank == 0 or engine.name == 3:
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert all(g.abs().sum() > 0 for g in grads) and all(p.grad is None for p in model.parameters())
    loss.backward()


def backward_created(model: nn.Module, engine: Engine, step: int) -> None:
    model(batch(step, engine.rank)).square().mean().backward(create_graph=True)


def backward_evaluated(model: nn.Module, engine: Engine, step: int) -> None:
    """Evaluation before, between forward and backward, and before step."""
    with torch.no_grad():
        model.eval()(batch(50, engine.rank))
    out = model.train()(batch(step, engine.rank))
    with torch.inference_mode():
        model(batch(51, engine.rank))
    out.square().mean().backward()
    model.eval()
    with torch.no_grad():
        model(batch(52, engine.rank))
    model(batch(53, engine.rank))  # a graph that nobody uses
    model.train()


BACKWARDS: dict[str, tuple[Any, bool]] = {  # name -> what to call, and whether two ranks give the reference's bits
    "repeated forward": (backward_repeated_forward, True),
    "non-scalar": (backward_non_scalar, True),
    "several": (backward_several, False),
    "several after forwards": (backward_several_after_forwards, False),
    "retain_graph": (backward_retained, False),
    "autocast": (backward_autocast, True),
    "gradient penalty": (backward_penalty, True),
    "autograd.grad": (backward_asked_for, True),
    "create_graph": (backward_created, True),
    "evaluation": (backward_evaluated, True),
}


def train_backward(engine: Engine, name: str) -> dict[str, Any]:
    model = engine.wrap(mlp())
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9)
    for step in range(3):
        BACKWARDS[name][0](model, engine, step)
        sgd.step()
        sgd.zero_grad()
    return {"params": params_of(model)}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", BACKWARDS)
def test_every_way_to_call_backward_gives_plain_gradients(name: str) -> None:
    check(2, train_backward, "plain", exact=BACKWARDS[name][1], name=name)
    check(1, train_backward, "plain", exact=False, name=name)


def train_checkpointed(engine: Engine, reentrant: bool, outside: bool, bucket_bytes: int) -> dict[str, Any]:
    model = engine.wrap(mlp() if outside else CheckpointedTwice(reentrant, DIM), bucket_bytes=bucket_bytes)
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9)
    for step in range(3):
        x = batch(step, engine.rank).requires_grad_()
        if outside:  # the whole model, in two checkpoints
            y = sum(checkpoint(model, x * i, use_reentrant=reentrant) for i in (1, 2))
        else:
            y = model(x)
        y.square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    return {"params": params_of(model)}


@pytest.mark.parametrize(("reentrant", "outside"), thinned([False, True], [False, True]))
def test_checkpoints_give_plain_gradients_though_hooks_run_twice(reentrant: bool, outside: bool) -> None:
    for bucket_bytes in (1, 1 << 20):
        fields = {"reentrant": reentrant, "outside": outside, "bucket_bytes": bucket_bytes}
        check(2, train_checkpointed, "plain", exact=False, **fields)


def use_a_stale_graph(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(mlp())
    sgd = engine.optimizer(model, torch.optim.SGD)
    loss = model(batch(0, engine.rank)).square().mean()
    loss.backward(retain_graph=True)
    sgd.step()
    sgd.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        return {"error": "modified by an inplace operation" in str(error)}
    return {"error": None}


def test_a_graph_older_than_the_step_raises_as_in_plain_pytorch() -> None:
    everyone = check(2, use_a_stale_graph, "plain")
    assert everyone[0][0]["error"] is True


def train_past_an_error(engine: Engine, accumulating: bool) -> dict[str, Any]:
    model = engine.wrap(Mined(mlp(), nn.Linear(4, 4)))
    adam = engine.optimizer(model)
    for step in range(4):
        bare(model).armed = step in (0, 2)
        if bare(model).armed:
            try:
                if accumulating and isinstance(engine, Staged):
                    with onefold.accumulate(model):
                        model(batch(90, engine.rank)).sum().backward()
                else:
                    model(batch(90, engine.rank)).sum().backward()
                raise AssertionError("no error")
            except ArithmeticError:
                adam.zero_grad()
            bare(model).armed = False
        model(batch(step, engine.rank)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    return {"params": params_of(model)}


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_model_is_usable_after_an_error_in_backward_and_zero_grad(accumulating: bool) -> None:
    check(2, train_past_an_error, "plain", accumulating=accumulating)


def count_hooks(stage: int) -> tuple[int, bool, float]:
    model = Staged(stage).wrap(mlp())
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    model[2].bias.register_hook(lambda grad: grad * 0)
    adam = Staged(stage).optimizer(model, torch.optim.SGD)
    before = params_of(model)
    for step in range(2):
        model(batch(step, 0)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    moved = (params_of(model)["2.bias"] - before["2.bias"]).abs().max().item()
    return len(seen), all(bool(g.abs().sum() > 0) for g in seen), moved


def test_hooks_of_users_on_parameters_run_and_may_change_the_gradient() -> None:
    for stage in STAGES:
        assert run_ranks(2, count_hooks, stage) == [(2, True, 0.0)] * 2
