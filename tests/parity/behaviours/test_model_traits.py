"""What modules may be made of and may return: the gradients are those of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import RankFailure, run_ranks
from tests.models import FrozenMiddle, Out, Repeated, Returning, Sizes, Tied, Tiny
from tests.parity.behaviours.engines import DIM, STAGES, Engine, bare, batch, check, compare, mlp, on_rank, params_of


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.square().mean()
    if isinstance(output, Out):
        return loss_of(output.y)
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return sum((loss_of(part) for part in parts), torch.zeros(()))


KINDS = ("dict", "tuple", "list", "dataclass", "parameter")
NOT_DDP = ["dataclass", "parameter"]  # it looks for unused parameters in outputs, and misreads these two
TRAITS: dict[str, Any] = {
    "Tiny": Tiny,
    "Sizes": lambda: Sizes(DIM),
    "Tied": lambda: Tied(DIM),
    "Repeated": lambda: Repeated(DIM),
    "Frozen": lambda: FrozenMiddle(DIM, DIM, 3),
    **{kind: (lambda kind=kind: Returning(kind, DIM)) for kind in KINDS},
}


def train_trait(engine: Engine, names: list[str]) -> dict[str, Any]:
    params, losses = {}, {}
    for name in names:
        torch.manual_seed(3)
        model = engine.wrap(TRAITS[name]())
        adam = engine.optimizer(model, groups=[{"params": []}, {"params": trained(model)}])
        for step in range(4):
            loss = loss_of(model(batch(step, engine.rank)))
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses[f"{name} {step}"] = loss.item()
        params[name] = params_of(model)
    return {"params": params, "losses": losses}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_kind_of_module_trains_as_with_ddp(ranks: int) -> None:
    with_ddp = [name for name in TRAITS if name not in NOT_DDP]
    check(ranks, train_trait, "ddp", names=with_ddp)
    check(ranks, train_trait, "plain", names=NOT_DDP)


def test_one_rank_trains_as_plain_pytorch() -> None:
    check(1, train_trait, "plain", names=list(TRAITS))


def train_parameter_twice(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(Returning("parameter", DIM))
    sgd = engine.optimizer(model, torch.optim.SGD)
    for step in range(2):
        for micro in range(2):
            y, alone = model(batch(step + 10 * micro, engine.rank))
            (y.square().mean() + alone.square().sum()).backward()
        sgd.step()
        sgd.zero_grad()
    return {"params": params_of(model)}


def test_a_parameter_returned_from_forward_may_get_gradients_of_two_backwards() -> None:
    check(2, train_parameter_twice, "plain", exact=False)


def train_two_models(engine: Engine, swap: bool, **fields: Any) -> dict[str, Any]:
    """A combined loss; the second model has an optimizer and a pace of its own."""
    first, second = engine.wrap(mlp(), **fields), engine.wrap(mlp(), **fields)
    one, two = engine.optimizer(first), engine.optimizer(second, torch.optim.SGD, momentum=0.9)
    losses = []
    for step in range(4):
        x = batch(step, engine.rank)
        if swap and engine.rank % 2:
            b, a = second(x), first(x)
        else:
            a, b = first(x), second(x)
        loss = a.square().mean() + (b - a).abs().mean()
        loss.backward()
        one.step()
        one.zero_grad()
        if step % 2:
            two.step()
            two.zero_grad()
        losses.append(loss.item())
    return {"params": {"first": params_of(first), "second": params_of(second)}, "losses": losses}


def test_two_models_with_one_loss_and_two_optimizers() -> None:
    check(2, train_two_models, "plain", exact=False, swap=False)


@pytest.mark.parametrize("stage", STAGES)
def test_two_alike_models_that_ranks_run_in_another_order_are_never_mixed_up(stage: int) -> None:
    """Right, or an error: never one model's gradient in the other."""
    try:
        everyone = run_ranks(
            2, on_rank, train_two_models, [stage, "plain"], {"swap": True, "bucket_bytes": 1 << 20, "timeout_s": 2}
        )
    except RankFailure as failure:
        assert "CommError" in str(failure)
    else:
        compare(everyone[0][stage], everyone[0]["plain"], False, f"stage {stage}")


def train_adversaries(engine: Engine) -> dict[str, Any]:
    """Gradients flow through a model that is switched off, into another."""
    maker, judge = engine.wrap(nn.Linear(DIM, DIM)), engine.wrap(mlp())
    one, two = engine.optimizer(maker), engine.optimizer(judge)
    for step in range(3):
        x = batch(step, engine.rank)
        judge.requires_grad_(False)
        bare(judge)(maker(x)).mean().backward()
        one.step()
        one.zero_grad()
        judge.requires_grad_(True)
        judge(maker(x).detach()).square().mean().backward()
        two.step()
        two.zero_grad()
    return {"params": {"maker": params_of(maker), "judge": params_of(judge)}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_flow_through_a_model_that_is_switched_off(ranks: int) -> None:
    check(ranks, train_adversaries, "plain")
