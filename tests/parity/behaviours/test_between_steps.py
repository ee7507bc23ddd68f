"""What users do around steps, without offload: look, edit, load in part, fail and go on. Every stage, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import Residual, ReturningNode, ReturningWeight, Stack, Tables

WIDTH, TIMEOUT_S = 16, 20.0
SPLIT = onefold.Precision(compute="bf16", master="split")


def made(kind: type[Stack] | type[Tables]) -> nn.Module:
    if issubclass(kind, Tables):
        return kind(WIDTH)
    return kind(
        first=nn.Linear(WIDTH, WIDTH),
        layers=nn.ModuleList(Residual(WIDTH, activation=torch.relu) for _ in range(4)),
        head=nn.Linear(WIDTH, 8),
    )


def built(
    stage: int, precision: Any = "fp32", *, net: type[Stack] | type[Tables] = Stack, inside: bool = False, **fields: Any
) -> tuple[Any, onefold.Optimizer]:
    onefold.init()
    torch.manual_seed(0)
    model = onefold.shard(made(net), stage=stage, precision=precision, bucket_bytes=2 << 10, timeout_s=TIMEOUT_S)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=inside, **fields)


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def loss_of(model: Any, step: int) -> Tensor:
    given = model(rows(step))
    return (given if isinstance(given, Tensor) else given[0]).float().square().mean()


def train(model: Any, optimizer: onefold.Optimizer, step: int) -> None:
    optimizer.backward(loss_of(model, step))
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> list[Tensor]:
    with onefold.full_parameters(model):
        return [param.detach().clone() for param in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- updates inside backward ------------------------------------------------------------------------------------------


def looked_at(stage: int, precision: Any, look: str) -> bool:
    """Between a backward that updates and its step: nothing changes by being looked at, and all of it is new."""
    ends = []
    for inside, looks in ((False, ""), (True, ""), (True, look)):
        model, optimizer = built(stage, precision, inside=inside)
        train(model, optimizer, 0)
        loss_of(model, 1).backward()
        seen = onefold.full_state_dict(model) if looks == "state dict" else None
        if looks == "written":
            with onefold.full_parameters(model, write=True):
                pass
        if looks == "autograd":
            x = rows(2).requires_grad_()
            torch.autograd.grad(model(x).float().sum(), x)
        optimizer.step()
        ends.append(onefold.full_state_dict(model))
        if seen:
            assert all(torch.equal(value, ends[-1][name]) for name, value in seen.items())
    want = ends[0]
    return all(end.keys() == want.keys() and all(torch.equal(want[n], end[n]) for n in want) for end in ends[1:])


@pytest.mark.parametrize(
    ("stage", "look", "precision"),
    thinned((0, 1, 2, 3), ("state dict", "written", "autograd"), ("fp32", "bf16", SPLIT)),
)
def test_a_look_between_a_backward_that_updates_and_its_step_changes_nothing(
    stage: int, look: str, precision: Any
) -> None:
    assert all(run_ranks(2 if stage else 1, looked_at, stage, precision, look))


def edited(stage: int, precision: Any, inside: bool) -> float:
    model, optimizer = built(stage, precision, inside=inside)
    train(model, optimizer, 0)
    optimizer.backward(loss_of(model, 1))
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    optimizer.step()
    if not inside:
        optimizer.zero_grad()
    train(model, optimizer, 2)
    return model.head.weight.float().mean().item()


@pytest.mark.parametrize(("ranks", "stage", "inside"), [(1, 0, False), (2, 2, False), (2, 2, True)])
def test_an_edit_between_backward_and_step_reaches_the_master(ranks: int, stage: int, inside: bool) -> None:
    for precision in ("bf16", SPLIT):
        assert run_ranks(ranks, edited, stage, precision, inside) == pytest.approx([0.497] * ranks, abs=0.002)


def trained(stage: int, net: type[nn.Module], inside: bool) -> list[Tensor]:
    model, optimizer = built(stage, net=net, inside=inside)
    for step in range(3):
        train(model, optimizer, step)
    return whole(model)


@pytest.mark.parametrize("net", [Tables, ReturningWeight])
def test_units_that_backward_does_without_are_updated_inside_it_all_the_same(net: type[nn.Module]) -> None:
    """At stage 3 each rank has offered its shard of them: nobody may wait for a fetch that never comes."""
    plain = run_ranks(2, trained, 0, net, False)[0]
    for stage in (2, 3):
        assert all(same(plain, found) for found in run_ranks(2, trained, stage, net, True)), stage


def penalised(stage: int, inside: bool) -> list[Tensor]:
    model, optimizer = built(stage, inside=inside)
    for step in range(2):
        x = rows(step).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_a_gradient_penalty_with_updates_inside_backward() -> None:
    plain = run_ranks(2, penalised, 0, False)[0]
    assert all(same(plain, found) for found in run_ranks(2, penalised, 3, True))


# -- whole parameters --------------------------------------------------------------------------------------------------


def nested(stage: int, precision: Any) -> list[Tensor]:
    model, optimizer = built(stage, precision)
    train(model, optimizer, 0)
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.head.weight.mul_(2)
        with onefold.full_parameters(model, write=True):
            model.head.bias.add_(1)
        model.first.bias.add_(1)
        state = onefold.full_state_dict(model)
        assert not state or torch.equal(state["head.bias"].to(model.head.bias.dtype), model.head.bias)
    train(model, optimizer, 1)
    return whole(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16", SPLIT], ids=str)
def test_writes_in_nested_contexts_are_kept_and_seen_in_a_state_dict(precision: Any) -> None:
    plain = run_ranks(2, nested, 0, precision)[0]
    for stage in (1, 2, 3):
        assert all(same(plain, found) for found in run_ranks(2, nested, stage, precision)), stage


class OfUsers(Exception):
    pass


def raised_inside(stage: int, precision: Any) -> tuple[str, bool]:
    model, optimizer = built(stage, precision)
    train(model, optimizer, 0)
    before, said = whole(model), ""
    try:
        with onefold.full_parameters(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
            raise OfUsers
    except Exception as error:
        said = type(error).__name__
    after = whole(model)
    train(model, optimizer, 1)
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.head.bias.zero_()
    return said, same(before, after)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_error_among_writes_is_what_users_hear_and_training_goes_on(precision: str) -> None:
    for stage in (2, 3):
        assert run_ranks(2, raised_inside, stage, precision) == [("OfUsers", stage == 3)] * 2


def loaded_in_part(stage: int) -> float:
    model, optimizer = built(stage, "bf16")
    train(model, optimizer, 0)
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    model.load_state_dict({"first.bias": torch.zeros(WIDTH)}, strict=False)
    train(model, optimizer, 1)
    return model.head.weight.float().mean().item()


def test_a_state_dict_of_some_parameters_leaves_edits_of_others_alone() -> None:
    for ranks, stage in ((1, 0), (2, 2)):
        assert run_ranks(ranks, loaded_in_part, stage) == pytest.approx([0.498] * ranks, abs=0.002)


# -- failures and odd orders -------------------------------------------------------------------------------------------


def failed_then_evaluated(stage: int, inside: bool) -> list[Tensor]:
    model, optimizer = built(stage, inside=inside)
    train(model, optimizer, 0)
    train(model, optimizer, 1)

    def refuse(_: Tensor) -> None:
        raise OfUsers

    hook = model.layers[1].register_forward_hook(lambda module, args, output: output.register_hook(refuse) and None)
    with pytest.raises(OfUsers):
        loss_of(model, 2).backward()
    hook.remove()
    with torch.no_grad():
        model(rows(9))
    optimizer.step() if inside else optimizer.zero_grad()
    train(model, optimizer, 3)
    return whole(model)


@pytest.mark.parametrize("inside", [True, False])
def test_after_a_backward_that_failed_an_evaluation_and_training_go_on(inside: bool) -> None:
    plain = run_ranks(2, failed_then_evaluated, 2, inside)[0]
    assert all(same(plain, found) for found in run_ranks(2, failed_then_evaluated, 3, inside))


def dropped_before_backward(stage: int) -> list[Tensor]:
    """One rank's loss does not come from the model, and gradients are dropped between forward and backward."""
    model, optimizer = built(stage)
    train(model, optimizer, 0)
    x = rows(1).requires_grad_()
    given = model(x)
    optimizer.zero_grad()
    (given.square().mean() if dist.get_rank() == 0 else x.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 2)
    return whole(model)


def test_a_rank_without_gradients_counts_as_zeros_wherever_gradients_are_dropped() -> None:
    plain = run_ranks(2, dropped_before_backward, 0)[0]
    for stage in (1, 2, 3):
        assert all(same(plain, found) for found in run_ranks(2, dropped_before_backward, stage)), stage


def scaled(stage: int, drop: str) -> tuple[float, float]:
    scale = onefold.LossScale(initial=2.0**12, growth_interval=2)
    model, optimizer = built(stage, "fp16", loss_scale=scale)
    left = 0.0
    for step in range(5):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        if drop == "zeros":
            optimizer.zero_grad(set_to_none=False)
            left += 0.0 if stage else sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
        else:
            for param in model.parameters():
                param.grad = None
    return optimizer.loss_scale, left


@pytest.mark.parametrize("drop", ["zeros", "one by one"])
def test_what_was_dropped_has_no_loss_scale(drop: str) -> None:
    for ranks, stage in ((1, 0), (2, 2)):
        assert run_ranks(ranks, scaled, stage, drop) == [(2.0**14, 0.0)] * ranks


def in_a_circle(stage: int) -> list[Tensor]:
    model, optimizer = built(stage, net=ReturningNode)
    for step in range(2):
        model(rows(step)).children[0].tensor.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_outputs_that_hold_themselves() -> None:
    plain = run_ranks(2, in_a_circle, 0)[0]
    assert all(same(plain, found) for found in run_ranks(2, in_a_circle, 3))
