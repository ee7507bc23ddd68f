"""Unusual training loops at stage 3, and every setting of look-ahead, whole units and unit size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness.grids import thinned
from tests.models import DIM, Counting
from tests.parity.stage3.compare import Case, Turn, assert_equal, batch, differences, learn


def retained(model: nn.Module, step: int) -> Tensor:
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    return loss


def several(model: nn.Module, step: int) -> Tensor:
    return sum(learn(model, 10 * step + i).detach() for i in range(3))


def forwards_first(model: nn.Module, step: int) -> Tensor:
    losses = [model(batch(step, micro=i)).square().mean() for i in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return losses[0]


def one_loss_of_three(model: nn.Module, step: int) -> Tensor:
    loss = sum(model(batch(step, micro=i)).square().mean() for i in range(3))
    loss.backward()
    return loss


def evaluated(model: nn.Module, step: int) -> Tensor:
    """Evaluation before and behind the step's forward, before its backward, and on other numbers of inputs."""
    with torch.no_grad():
        before = model.eval()(batch(step, micro=1)).sum()
    out = model.train()(batch(step))
    with torch.inference_mode():
        model.eval()(batch(step, 5, DIM))
    model.train()
    loss = out.square().mean()
    loss.backward()
    model.eval()
    with torch.no_grad():
        behind = model(batch(step, micro=2)).sum() + model(batch(step, micro=3)).sum()
    model(batch(step, micro=4))  # a graph that nobody uses
    model.train()
    return loss + before + behind


def generated(model: nn.Module, step: int) -> Tensor:
    """Many forwards with whole parameters, in training or not."""
    loss = learn(model, step)
    with onefold.full_parameters(model), torch.no_grad():
        seen = sum(model(batch(step, micro=i)).sum() for i in range(3))
    return loss + seen


def penalised(model: nn.Module, step: int) -> Tensor:
    x = batch(step).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.square().mean() + slope.square().sum()
    loss.backward()
    return loss


def asked_for(model: nn.Module, step: int) -> Tensor:
    """autograd.grad of the parameters, whose gradients are the caller's, then backward."""
    loss = model(batch(step)).square().mean()
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, retain_graph=True)
    loss.backward()
    return loss + sum(g.abs().sum() for g in grads)


@contextmanager
def planned_failure() -> Iterator[None]:
    try:
        yield
        raise AssertionError("no error came")
    except ValueError as error:
        assert "as planned" in str(error)


def fail(grad: Tensor) -> None:
    raise ValueError("as planned")


def failing_forward(model: nn.Module, step: int) -> Tensor:
    model.fail = True
    with planned_failure():
        model(batch(90))
    model.fail = False
    return learn(model, step)


def failing_backward(model: nn.Module, step: int) -> Tensor:
    """In the middle of backward, on every rank, in every step but the first."""
    if step:
        seen: list[Tensor] = []
        handle = model.layers[1].register_forward_hook(lambda m, args, out: seen.append(out))
        out = model(batch(90))
        handle.remove()
        seen[0].register_hook(fail)
        with planned_failure():
            out.sum().backward()
        model.zero_grad()
    return learn(model, step)


def failing_recovery(model: nn.Module, step: int) -> Tensor:
    """An error in forward, then one in evaluation, then a good step."""
    model.fail = True
    with planned_failure(), torch.no_grad():
        model(batch(90))
    model.fail = False
    return evaluated(model, step)


TURNS: dict[str, Turn] = {
    turn.__name__: turn
    for turn in (
        retained, several, forwards_first, one_loss_of_three, evaluated, generated, penalised, asked_for,
        failing_forward, failing_backward, failing_recovery,
    )
}  # fmt: skip


def turned(name: str, **fields: Any) -> list[str]:
    return differences(Case(Counting, TURNS[name]), **fields)


@pytest.mark.parametrize(("name", "ranks"), thinned(TURNS, [2, 3]))
def test_every_training_loop_gives_the_same_bits(name: str, ranks: int) -> None:
    assert_equal(ranks, turned, name)


@pytest.mark.parametrize("name", ["retained", "forwards_first", "evaluated", "penalised", "failing_backward"])
def test_every_training_loop_works_with_one_unit_per_block(name: str) -> None:
    assert_equal(2, turned, name, bucket_bytes=1 << 20)


def accumulating(reduce: str) -> list[str]:
    def turn(model: nn.Module, step: int) -> Tensor:
        with onefold.accumulate(model, reduce=reduce):
            first = learn(model, 10 * step) + learn(model, 10 * step + 1)
        return first + learn(model, 10 * step + 2)

    return differences(Case(Counting, turn))


@pytest.mark.parametrize(("reduce", "ranks"), thinned(["once", "each"], [2, 3]))
def test_accumulated_gradients_give_the_same_bits(reduce: str, ranks: int) -> None:
    assert_equal(ranks, accumulating, reduce)


def small(name: str, elements: int) -> bool:
    return elements < 600


SETTINGS: dict[str, dict[str, Any]] = {
    **{f"prefetch={n}": {"prefetch": n} for n in (0, 1, 3, 1000)},
    **{f"prefetch={n}, one unit per block": {"prefetch": n, "bucket_bytes": 1 << 20} for n in (0, 3, 1000)},
    "keep_whole=200": {"keep_whole": 200},
    "keep_whole=600, bucket_bytes=1": {"keep_whole": 600, "bucket_bytes": 1},
    "keep_whole=all": {"keep_whole": 1 << 30},
    "keep_whole=callable": {"keep_whole": small, "bucket_bytes": 1 << 12},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "reshard_after_forward=False, bucket_bytes=1": {"reshard_after_forward": False, "bucket_bytes": 1},
    "bucket_bytes=1": {"bucket_bytes": 1},
    "bucket_bytes=1, prefetch=5": {"bucket_bytes": 1, "prefetch": 5},
    "bucket_bytes=huge": {"bucket_bytes": 1 << 40},
    "one unit for all": {"bucket_bytes": 1 << 40, "units": lambda name, module: False},
    "plain layers are units": {"bucket_bytes": 1 << 40, "units": nn.Linear},
}


def at_settings(name: str, turn: Turn) -> list[str]:
    return differences(Case(Counting, turn), **SETTINGS[name])


@pytest.mark.parametrize(("name", "turn"), thinned(SETTINGS, [learn, forwards_first]))
def test_no_setting_changes_a_bit(name: str, turn: Turn) -> None:
    assert_equal(2, at_settings, name, turn)


@pytest.mark.parametrize(
    ("name", "ranks"), thinned(["prefetch=1", "prefetch=3", "bucket_bytes=1", "keep_whole=200"], [1, 4])
)
def test_one_and_four_ranks_give_the_same_bits(name: str, ranks: int) -> None:
    assert_equal(ranks, at_settings, name, forwards_first)
