"""Schedulers, groups, clipping and saved state change the result exactly as they do with torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import Pair
from tests.parity.behaviours.engines import DIM, STAGES, Engine, Staged, bare, batch, check, mlp, params_of, whole

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=3, eta_min=1e-4),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=6),
}


def train_scheduled(engine: Engine, scheduler: str, cls: str) -> dict[str, Any]:
    model = engine.wrap(mlp())
    kwargs = {"momentum": 0.8} if cls == "SGD" else {}
    optimizer = engine.optimizer(model, getattr(torch.optim, cls), **kwargs)
    schedule = SCHEDULERS[scheduler](optimizer)
    seen = []
    for step in range(5):
        model(batch(step, engine.rank)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group.get("betas"), group.get("momentum")))
    return {"params": params_of(model), "seen": seen}


@pytest.mark.parametrize(("scheduler", "cls"), thinned(SCHEDULERS, ["AdamW", "SGD"]))
def test_learning_rate_schedules_act_as_with_ddp(scheduler: str, cls: str) -> None:
    everyone = check(2, train_scheduled, "ddp", scheduler=scheduler, cls=cls)
    assert len(set(everyone[0][0]["seen"])) > 2


def train_growing_groups(engine: Engine) -> dict[str, Any]:
    """Two groups at first, an empty one, one more after two steps; the last bias is in none."""
    model = engine.wrap(mlp(), bucket_bytes=1 << 20)
    layers = bare(model)
    groups: list[dict[str, Any]] = [
        {"params": [layers[0].weight, layers[4].weight], "lr": 3e-2},
        {"params": []},
        {"params": [layers[0].bias], "weight_decay": 0.0},
    ]
    adam = engine.optimizer(model, groups=groups)
    start = params_of(model)
    for step in range(5):
        if step == 2:
            assert torch.equal(params_of(model)["2.weight"], start["2.weight"]), "in no group, but moved"
            adam.add_param_group({"params": list(layers[2].parameters()), "lr": 5e-3, "betas": (0.5, 0.9)})
        if step == 3:
            adam.param_groups[0]["lr"] = 1e-3
        model(batch(step, engine.rank)).square().mean().backward()
        adam.step()
        model.zero_grad()  # the optimizer's own would, in torch, leave out what is in no group
    return {"params": params_of(model)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_may_be_empty_differ_and_be_added_later(ranks: int) -> None:
    check(ranks, train_growing_groups, "plain" if ranks == 1 else "ddp")


def train_clipped(engine: Engine, max_norm: float, norm_type: float, double: bool = False) -> dict[str, Any]:
    model = mlp().double() if double else mlp()
    model = engine.wrap(nn.ModuleDict({"body": model, "unused": nn.Linear(3, 3)}))
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9)
    norms = []
    for step in range(3):
        x = batch(step, engine.rank).double() if double else batch(step, engine.rank)
        forward_body(model, x).square().sum().backward()
        norms.append(engine.clip(sgd, model, max_norm, norm_type).double())
        sgd.step()
        sgd.zero_grad()
    return {"params": params_of(model), "norms": norms}


def forward_body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return bare(model)["body"](x)


@pytest.mark.parametrize(("max_norm", "norm_type"), thinned([0.1, 1e6], [2.0, 1.0, 3.0, float("inf")]))
def test_the_norm_and_the_clipped_gradient_are_torchs(max_norm: float, norm_type: float) -> None:
    everyone = check(3, train_clipped, "plain", max_norm=max_norm, norm_type=norm_type)
    assert (everyone[0]["plain"]["norms"][0] > max_norm) == (max_norm == 0.1)


def test_float64_gradients_are_clipped() -> None:
    check(2, train_clipped, "plain", exact=False, max_norm=0.1, norm_type=2.0, double=True)


def train_torch_clip() -> tuple[Any, Any]:
    """At stage 0 gradients are whole, so torch's own function sees all there is."""
    results = []
    for ours in (True, False):
        torch.manual_seed(1)
        engine = Staged(0)
        model = engine.wrap(mlp())
        sgd = engine.optimizer(model, torch.optim.SGD)
        norms = []
        for step in range(3):
            model(batch(step, engine.rank)).square().sum().backward()
            norms.append(sgd.clip_grad_norm(0.1) if ours else clip_grad_norm_(model.parameters(), 0.1))
            sgd.step()
            sgd.zero_grad()
        results.append((params_of(model), norms))
    return results[0], results[1]


def test_torchs_clip_grad_norm_works_at_stage_0() -> None:
    for ours, torchs in run_ranks(2, train_torch_clip):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def train_with_zeros(engine: Engine, by: str, set_to_none: bool) -> dict[str, Any]:
    """The second layer is skipped from step 2 on; zeros keep its momentum moving, None does not."""
    model = engine.wrap(Pair(DIM), bucket_bytes=1 << 20)
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9)
    for step in range(5):
        model(batch(step, engine.rank), step < 2).square().mean().backward()
        sgd.step()
        if step == 1:
            before = params_of(model)["second.weight"]
        (sgd if by == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    return {"params": params_of(model), "moved": not torch.equal(before, params_of(model)["second.weight"])}


@pytest.mark.parametrize(("by", "set_to_none"), thinned(["optimizer", "model"], [True, False]))
def test_zero_grad_means_what_it_means_in_torch(by: str, set_to_none: bool) -> None:
    everyone = check(2, train_with_zeros, "plain", by=by, set_to_none=set_to_none)
    assert everyone[0][0]["moved"] is not set_to_none


def step_on_zeros(engine: Engine, reduce: str | None) -> dict[str, Any]:
    """zero_grad(set_to_none=False), then step with no backward between: momentum and decay go on."""
    model = engine.wrap(mlp())
    adam = engine.optimizer(model)
    for _ in range(2):
        with engine.accumulate(model, reduce):
            model(batch(0, engine.rank)).square().mean().backward()
        adam.zero_grad(set_to_none=False)
        adam.step()
    return {"params": params_of(model)}


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_a_step_on_zeroed_gradients_is_a_step_with_zeros(reduce: str) -> None:
    check(2, step_on_zeros, "plain", exact=False, reduce=reduce)


def resume(stage: int, rewind: bool) -> tuple[Any, Any, str]:
    """Train 3, save, train 3; load (into the same, or new objects), train the same 3 again."""
    engine = Staged(stage)

    def make() -> tuple[nn.Module, Any]:
        model = engine.wrap(Pair(DIM), bucket_bytes=1 << 20)
        return model, engine.optimizer(model)

    def train(model: nn.Module, adam: Any, steps: range) -> Any:
        for step in steps:
            model(batch(step, engine.rank), step in (0, 4)).square().mean().backward()  # slices part at step 1
            adam.step()
            adam.zero_grad()
        return params_of(model)

    model, adam = make()
    first = 1 if rewind else 3  # a rewind goes back to before the slices parted
    train(model, adam, range(first))
    adam.param_groups[0]["lr"] = 2e-2
    with whole(model):
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(adam.state_dict())
    through = train(model, adam, range(first, 6))
    if not rewind:
        model, adam = make()
    with whole(model, write=True):
        model.load_state_dict(saved[0])
    adam.load_state_dict(saved[1])
    again = train(model, adam, range(first, 6))
    saved[1]["onefold"]["rank"] += 1
    try:
        adam.load_state_dict(saved[1])
    except onefold.StateError as error:
        return through, again, str(error)
    return through, again, ""


@pytest.mark.parametrize(("stage", "rewind"), thinned(STAGES, [False, True]))
def test_saved_state_continues_bit_for_bit_and_is_refused_by_another_rank(stage: int, rewind: bool) -> None:
    for through, again, error in run_ranks(2, resume, stage, rewind):
        for name in through:
            assert torch.equal(through[name], again[name]), name
        assert "one rank's shard" in error
