"""A parameter or gradient changed behind the library's back is found at the next forward or step, and named."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from onefold import StateError
from tests.faults.test_misuse import SHARDED, STAGES, Ended, Training, same, undisturbed
from tests.harness import run_ranks
from tests.harness.grids import thinned

__all__ = ["undisturbed"]  # a fixture


class Mistake(NamedTuple):
    act: Callable[[Training], Callable[[], Any] | None]  # gives what undoes it, where it can be undone
    named: str
    stages: tuple[int, ...] = STAGES


def replaced(t: Training) -> Callable[[], Any]:
    old = t.model.last.weight
    t.model.last.weight = nn.Parameter(old.detach().clone())
    return lambda: setattr(t.model.last, "weight", old)


def replaced_frozen(t: Training) -> Callable[[], Any]:
    old = t.model.frozen.weight
    t.model.frozen.weight = nn.Parameter(old.detach().clone())
    return lambda: setattr(t.model.frozen, "weight", old)


def replaced_module(t: Training) -> Callable[[], Any]:
    old = t.model.last
    t.model.last = nn.Linear(16, 2)
    return lambda: setattr(t.model, "last", old)


def removed(t: Training) -> Callable[[], Any]:
    old = t.model.last.bias
    t.model.last.bias = None
    return lambda: setattr(t.model.last, "bias", old)


def added(t: Training) -> Callable[[], Any]:
    t.model.last.register_parameter("scale", nn.Parameter(torch.ones(2)))
    return lambda: delattr(t.model.last, "scale")


def added_module(t: Training) -> Callable[[], Any]:
    t.model.head = nn.Linear(2, 2)
    return lambda: delattr(t.model, "head")


def other_data(t: Training) -> Callable[[], Any]:
    old = t.model.first.bias.data
    t.model.first.bias.data = old.clone()
    return lambda: setattr(t.model.first.bias, "data", old)


def other_view(t: Training) -> Callable[[], Any]:
    """The same memory, read otherwise: only shape and strides tell."""
    old = t.model.last.weight.data
    t.model.last.weight.data = old.as_strided((2, 16), (1, 2))
    return lambda: setattr(t.model.last.weight, "data", old)


def from_vector(t: Training) -> Callable[[], Any]:
    params = list(t.model.parameters())
    old = [param.data for param in params]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params), params)
    return lambda: [setattr(param, "data", data) for param, data in zip(params, old, strict=True)]


def assigned(t: Training) -> None:
    t.model.load_state_dict({name: value.clone() for name, value in t.model.state_dict().items()}, assign=True)


BEFORE_FORWARD = {
    "replaced": Mistake(replaced, "last.weight"),
    "replaced, frozen": Mistake(replaced_frozen, "frozen.weight"),
    "module replaced": Mistake(replaced_module, "last.weight"),
    "removed": Mistake(removed, "last.bias"),
    "added": Mistake(added, "last.scale"),
    "module added": Mistake(added_module, "head.weight"),
    "other data": Mistake(other_data, "first.bias"),
    "other view of the same memory": Mistake(other_view, "last.weight"),
    "vector_to_parameters": Mistake(from_vector, "first.weight"),
    "load_state_dict(assign=True)": Mistake(assigned, "first.weight"),
}


def change_before_forward(name: str, stage: int) -> Ended:
    t = Training(stage)
    t.backward()
    t.update()
    undo = BEFORE_FORWARD[name].act(t)
    with pytest.raises(StateError) as caught:
        t.forward()
    if undo is None:
        return Ended(str(caught.value), False, [])
    undo()
    return Ended(str(caught.value), False, t.finish())


@pytest.mark.parametrize("name", BEFORE_FORWARD)
def test_a_changed_parameter_is_named_at_the_next_forward_and_once_undone_training_goes_on(
    name: str, undisturbed: list[Tensor]
) -> None:
    for stage in STAGES:
        for ended in run_ranks(2, change_before_forward, name, stage):
            assert BEFORE_FORWARD[name].named in ended.message and "shard()" in ended.message
            assert name == "load_state_dict(assign=True)" or same(ended.values, undisturbed), f"stage {stage}"


# -- gradients ---------------------------------------------------------------------------------------------------------


def other_gradient(t: Training) -> Callable[[], Any]:
    param = t.model.first.weight
    old, param.grad = param.grad, torch.ones_like(param)
    return lambda: setattr(param, "grad", old)


def change_gradient(then: str, stage: int) -> Ended:
    t = Training(stage)
    t.backward()
    t.update()
    t.backward()
    undo = other_gradient(t)
    before = t.values()
    with pytest.raises(StateError) as caught:
        getattr(t.optimizer, then)(*[1e9] * (then == "clip_grad_norm"))
    changed = not same(t.values(), before)
    undo()
    t.update()
    return Ended(str(caught.value), changed, t.finish())


@pytest.mark.parametrize(("then", "stage"), thinned(["step", "clip_grad_norm"], STAGES))
def test_a_replaced_gradient_is_named_and_changes_nothing(then: str, stage: int, undisturbed: list[Tensor]) -> None:
    for ended in run_ranks(2, change_gradient, then, stage):
        assert "first.weight.grad was replaced" in ended.message and "in place" in ended.message
        assert not ended.changed and same(ended.values, undisturbed)


def replaced_between_two_backwards(stage: int) -> str:
    t = Training(stage)
    t.backward()
    other_gradient(t)
    with pytest.raises(StateError) as caught:
        t.backward()
        t.optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_replaced_between_two_backwards_is_named_not_counted_twice(stage: int) -> None:
    for message in run_ranks(2, replaced_between_two_backwards, stage):
        assert "first.weight" in message


def set_to_none(stage: int) -> tuple[bool, bool]:
    t = Training(stage)
    t.backward()
    before = t.values()
    t.model.first.weight.grad = None
    t.optimizer.step()
    after = t.values()
    return torch.equal(before[0], after[0]), same(before[1:], after[1:])


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_set_to_none_leaves_that_parameter_alone_and_no_other(stage: int) -> None:
    assert run_ranks(2, set_to_none, stage) == [(True, False)] * 2


def plain_zero_grad(stage: int) -> None:
    t = Training(stage)
    t.backward()
    with pytest.raises(StateError, match="spread over ranks"):
        torch.optim.SGD(t.model.parameters(), lr=0.1).zero_grad(set_to_none=False)
    t.update()


@pytest.mark.parametrize("stage", SHARDED)
def test_another_optimizer_cannot_zero_a_sharded_gradient(stage: int) -> None:
    run_ranks(2, plain_zero_grad, stage)
