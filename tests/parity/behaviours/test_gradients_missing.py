"""A gradient on some ranks counts as zeros on the others; a gradient on no rank leaves the parameter alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import Branches, Passing
from tests.parity.behaviours.engines import DIM, STAGES, Engine, bare, batch, check, mlp, on_rank, params_of

STEPS = 6
SOME, NONE, LATE, TURNS = range(4)  # the branches


def picked(step: int, rank: int) -> list[int]:
    chosen = [SOME] if rank == 0 else []
    if step >= 3:
        chosen.append(LATE)
    if (step + rank) % 3 == 0:
        chosen.append(TURNS)
    return chosen


def state_of(engine: Engine, optimizer: Any, model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Step counts by parameter; a rank that owns no part of a parameter says nothing of it."""
    if engine.name == "ddp":
        return {
            name: (float(optimizer.state[p]["step"]),)
            for name, p in bare(model).named_parameters()
            if p in optimizer.state
        }
    counts: dict[str, tuple[float, ...]] = {}
    for unit in optimizer.by_unit:
        for row in unit.state_dict():
            for slot in row["slots"]:
                if row["state"]:
                    counts[unit.unit.layout.slots[slot].name] = (float(row["state"]["step"]),)
    return counts


def train_branches(engine: Engine, bucket_bytes: int = 1 << 10, optimizer: str = "AdamW") -> dict[str, Any]:
    model = engine.wrap(Branches(DIM), bucket_bytes=bucket_bytes)
    kwargs = {"momentum": 0.9, "weight_decay": 0.01} if optimizer == "SGD" else {}
    adam = engine.optimizer(model, getattr(torch.optim, optimizer), **kwargs)
    start = params_of(model)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, engine.rank), picked(step, engine.rank)).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        after = params_of(model)
        assert torch.equal(after["branches.1"], start["branches.1"]), "used by nobody, but moved"
        assert torch.equal(after["branches.2"], start["branches.2"]) == (step < 3)
    return {"params": params_of(model), "losses": losses}


@pytest.mark.parametrize(("ranks", "bucket_bytes"), thinned([2, 3], [1, 1 << 10, 1 << 20]))
def test_parameters_used_by_some_ranks_and_steps_train_as_with_ddp(ranks: int, bucket_bytes: int) -> None:
    check(ranks, train_branches, "ddp", bucket_bytes=bucket_bytes)
    check(ranks, train_branches, "ddp", "plain", bucket_bytes=bucket_bytes, optimizer="SGD")


def count_steps(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(Branches(DIM), bucket_bytes=1 << 20)
    adam = engine.optimizer(model)
    for step in range(STEPS):
        model(batch(step, engine.rank), picked(step, engine.rank)).sum().backward()
        adam.step()
        adam.zero_grad()
    return {"unequal": state_of(engine, adam, model)}


def test_the_step_count_of_each_parameter_is_ddps() -> None:
    for ranks in (2, 3):
        everyone = run_ranks(ranks, on_rank, count_steps, [*STAGES, "ddp"], {})
        wanted = everyone[0]["ddp"]["unequal"]
        assert wanted["branches.2"] == (3.0,) and "branches.1" not in wanted
        for stage in STAGES:
            found: dict[str, Any] = {}
            for results in everyone:
                for name, count in results[stage]["unequal"].items():
                    assert found.setdefault(name, count) == count
            assert found == wanted, f"stage {stage}"


def train_idle_rank(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(Passing(DIM))
    adam = engine.optimizer(model)
    for step in range(3):
        x = batch(step, engine.rank).requires_grad_()
        model(x, engine.rank != step % engine.size).square().mean().backward()
        adam.step()
        adam.zero_grad()
    return {"params": params_of(model)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_backward_uses_no_parameter_counts_as_zeros(ranks: int) -> None:
    check(ranks, train_idle_rank, "plain")  # DistributedDataParallel hangs, or takes no mean


def train_frozen_later(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(mlp())
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9, weight_decay=0.1)
    for step in range(5):
        if step == 2:
            bare(model)[2].requires_grad_(False)
            frozen = params_of(model)["2.weight"]
        if step == 4:
            bare(model)[2].requires_grad_(True)
        model(batch(step, engine.rank)).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
        if step in (2, 3):
            assert torch.equal(params_of(model)["2.weight"], frozen)
    return {"params": params_of(model)}


def test_a_parameter_frozen_after_some_steps_is_left_alone() -> None:
    check(2, train_frozen_later, "plain")
    check(3, train_frozen_later, "plain")


def train_set_none(engine: Engine, used_on: tuple[int, ...], between: bool) -> dict[str, Any]:
    """The user drops one parameter's gradient before step, or between two backwards."""
    model = engine.wrap(Branches(DIM), bucket_bytes=1 << 20)
    adam = engine.optimizer(model)
    for step in range(3):
        chosen = [SOME] if engine.rank in used_on else []
        for micro in range(2 if between else 1):
            if micro:
                bare(model).branches[SOME].grad = None
                bare(model).first.bias.grad = None
            model(batch(step + 10 * micro, engine.rank), [*chosen, TURNS]).square().mean().backward()
        if not between and step != 1:
            bare(model).branches[SOME].grad = None
            bare(model).first.weight.grad = None
        adam.step()
        adam.zero_grad()
    return {"params": params_of(model)}


@pytest.mark.parametrize("used_on", [(0, 1), (0,), (1,)])
def test_grad_set_to_none_before_step_leaves_the_parameter_alone(used_on: tuple[int, ...]) -> None:
    check(2, train_set_none, "ddp", used_on=used_on, between=False)


def test_grad_set_to_none_between_backwards_forgets_the_first() -> None:
    check(2, train_set_none, "ddp", exact=False, used_on=(0, 1), between=True)


def train_none_by_hand(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(mlp())
    adam = engine.optimizer(model)
    for step in range(3):
        model(batch(step, engine.rank)).square().mean().backward()
        adam.step()
        for param in model.parameters():
            param.grad = None
    return {"params": params_of(model)}


def test_setting_every_grad_to_none_by_hand_is_zero_grad() -> None:
    check(2, train_none_by_hand, "ddp")
