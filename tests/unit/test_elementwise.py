"""The probe admits every element-wise optimizer, refuses every other by name and reason, and leaves no trace."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim

from onefold import OptimizerError
from onefold.optim.elementwise import StateCost, examine
from onefold.optim.whole_trial import examine_whole
from tests.harness import run_ranks

CPU = torch.device("cpu")


class Written(optim.Optimizer):
    """Optimizers a user might write: `update` says how far to go, from values, gradient and state."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def update(self, param: Tensor, grad: Tensor, state: dict) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param, param.grad, self.state[param]), alpha=group["lr"])


class Lion(Written):
    def update(self, param, grad, state):
        average = state.setdefault("average", torch.zeros_like(param))
        direction = (0.9 * average + 0.1 * grad).sign()
        average.mul_(0.99).add_(grad, alpha=0.01)
        return direction


class LARS(Written):
    def update(self, param, grad, state):
        return grad * param.norm() / grad.norm()


class LAMB(Written):
    def update(self, param, grad, state):
        m, v = (state.setdefault(key, torch.zeros_like(param)) for key in "mv")
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).add_(grad * grad, alpha=0.001)
        step = m / (v.sqrt() + 1e-6)
        return step * param.norm() / step.norm()


class CentredSGD(Written):
    def update(self, param, grad, state):
        return grad - grad.mean()


class GlobalNormSGD(Written):
    """Scales by the norm over all parameters it was given, as Prodigy and D-Adaptation do with their estimates."""

    def update(self, param, grad, state):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return grad / torch.stack(grads).norm()


class LateNormSGD(Written):
    """Goes wrong in later steps only."""

    def update(self, param, grad, state):
        state["steps"] = state.get("steps", 0) + 1
        return grad if state["steps"] < 3 else grad / grad.norm()


class LateShampoo(Written):
    """Looks at its matrices of rows after ten steps only, but keeps them from the start."""

    def update(self, param, grad, state):
        rows = grad.reshape(grad.shape[0], -1)
        state["steps"] = state.get("steps", 0) + 1
        state["rows"] = state.get("rows", 0) + rows @ rows.T
        return grad if state["steps"] < 10 else (torch.linalg.inv(state["rows"]) @ rows).view_as(grad)


class LARC(Written):
    """Scales only gradients that are large beside the parameter."""

    def update(self, param, grad, state):
        return grad * (100 * param.norm() / grad.norm()).clamp(max=1.0)


class StableAdam(Written):
    """Scales only steps in which gradients are larger than they were."""

    def update(self, param, grad, state):
        steps = state["steps"] = state.get("steps", 0) + 1
        square = state.setdefault("square", torch.zeros_like(param))
        square.lerp_(grad.square(), 0.01 / (1 - 0.99**steps))
        ratios = grad.square() / square.clamp(min=1e-16)
        return grad / square.sqrt() / ratios.mean().sqrt().clamp(min=1.0)


class FactoredIfLarge(Written):
    """Keeps means of rows and columns of matrices without a short side, and single elements of others."""

    def update(self, param, grad, state):
        if grad.ndim < 2 or min(grad.shape) < 128:
            return grad.sign()
        square = grad.square()
        return grad / (square.mean(0) * square.mean(1, keepdim=True) / square.mean()).sqrt()


class EightBits(Written):
    """Keeps the momentum of larger tensors in 8 bits, scaled by blocks of 256 elements, as bitsandbytes does."""

    def update(self, param, grad, state):
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.9).add_(grad, alpha=0.1)
        if param.numel() >= 4096:
            for block in average.view(-1).split(256):
                scale = block.abs().max() / 127
                block.copy_((block / scale).round() * scale)
        return average


# -- admitted ----------------------------------------------------------------------------------------------------------

ADMITTED = [
    (optim.SGD, {}, StateCost(0, 0)),
    (optim.SGD, {"momentum": 0.9}, StateCost(4, 0)),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, StateCost(4, 0)),
    (optim.SGD, {"momentum": 0.9, "fused": True}, StateCost(4, 0)),
    (optim.SGD, {"momentum": 0.9, "foreach": True}, StateCost(4, 0)),
    (optim.Adam, {}, StateCost(8, 4)),
    (optim.Adam, {"fused": True}, StateCost(8, 4)),
    (optim.AdamW, {}, StateCost(8, 4)),
    (optim.AdamW, {"amsgrad": True}, StateCost(12, 4)),
    (optim.AdamW, {"fused": True}, StateCost(8, 4)),
    (optim.AdamW, {"foreach": True}, StateCost(8, 4)),
    (optim.AdamW, {"foreach": False, "maximize": True}, StateCost(8, 4)),
    (optim.Adagrad, {}, StateCost(4, 4)),
    (optim.Adagrad, {"fused": True}, StateCost(4, 4)),
    (optim.RMSprop, {}, StateCost(4, 4)),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}, StateCost(12, 4)),
    (optim.NAdam, {}, StateCost(8, 8)),
    (optim.RAdam, {}, StateCost(8, 4)),
    (optim.Adamax, {}, StateCost(8, 4)),
    (optim.ASGD, {}, StateCost(4, 12)),
    (optim.Rprop, {}, StateCost(8, 4)),
    (optim.Adadelta, {}, StateCost(8, 4)),
    (Lion, {}, StateCost(4, 0)),
]


def label(value: object) -> str | None:
    return getattr(value, "__name__", None) or (str(value) if isinstance(value, dict) else None)


@pytest.mark.parametrize("cls, kwargs, cost", ADMITTED, ids=label)
def test_an_element_wise_class_is_admitted_and_its_state_is_weighed(cls, kwargs, cost):
    defaults, found = examine(cls, kwargs, CPU)
    assert found == cost
    assert kwargs.items() <= defaults.items()


def test_defaults_are_those_of_the_class_with_the_given_settings():
    defaults, _ = examine(optim.AdamW, {"lr": 0.5}, CPU)
    assert defaults == optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5).defaults


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED = [
    (optim.LBFGS, "closure"),
    (optim.Muon, "2D"),
    (optim.SparseAdam, "dense gradients"),
    (optim.Adafactor, "not element-wise"),
    (LARS, "not element-wise"),
    (LAMB, "not element-wise"),
    (CentredSGD, "not element-wise"),
    (GlobalNormSGD, "not element-wise"),
    (LateNormSGD, "not element-wise"),
    (EightBits, "not element-wise"),
    (LateShampoo, "keeps state \\(rows\\)"),
    (LARC, "not element-wise"),
    (StableAdam, "not element-wise"),
    (FactoredIfLarge, "not element-wise"),
]


@pytest.mark.parametrize("cls, reason", REFUSED, ids=label)
def test_a_class_that_looks_beyond_its_own_element_is_refused_by_name_and_reason(cls, reason):
    with pytest.raises(OptimizerError, match=reason) as caught:
        examine(cls, {}, CPU)
    assert cls.__name__ in str(caught.value)


@pytest.mark.parametrize(
    "thing",
    [torch.nn.Linear, torch.nn.Linear(1, 1), optim.SGD([torch.nn.Parameter(torch.ones(1))]), optim.AdamW.step]
    + [lambda params: None, "AdamW", None],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_no_optimizer_class_is_refused_with_what_to_pass_instead(thing):
    with pytest.raises(OptimizerError, match="is not an optimizer class; pass a subclass of "):
        examine(thing, {}, CPU)


@pytest.mark.parametrize(
    "cls, kwargs",
    [
        (optim.AdamW, {"lr": -1}),
        (optim.Adam, {"lr": float("nan")}),
        (optim.AdamW, {"betas": (0.9, 1.5)}),
        (optim.SGD, {"nesterov": True}),
        (optim.AdamW, {"learning_rate": 0.1}),
    ],
    ids=label,
)
def test_settings_the_class_refuses_are_named(cls, kwargs):
    with pytest.raises(OptimizerError) as caught:
        examine(cls, kwargs, CPU)
    assert str(caught.value).startswith(f"{cls.__name__} refused its settings {kwargs}: ")
    assert isinstance(caught.value.__cause__, TypeError | ValueError)


@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_setting_that_is_not_finite_does_not_make_sgd_look_as_if_it_were_not_element_wise(lr):
    try:
        examine(optim.SGD, {"lr": lr}, CPU)
    except OptimizerError as error:
        assert "not element-wise" not in str(error)


def test_an_optimizer_error_is_a_value_error():
    assert issubclass(OptimizerError, ValueError)


class GlobalClip(Written):
    """Clips the norm over all its parameters, as FusedLAMB does, but only if that is large."""

    def update(self, param, grad, state):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        return grad / (torch.stack(grads).norm() / 1e3).clamp(min=1.0)


def test_a_class_that_clips_all_its_tensors_together_is_refused_though_it_clips_seldom():
    with pytest.raises(OptimizerError, match="needs several tensors at once"):
        examine_whole(GlobalClip, {}, CPU)


class Talking(Written):
    """Has other ranks update some of its parameters, as Muon's first implementation does."""

    def update(self, param, grad, state):
        dist.all_reduce(grad)
        return grad


def examined() -> str:
    """On a rank, which has a process group: what is said of the class."""
    with pytest.raises(OptimizerError) as caught:
        examine(Talking, {}, CPU)
    return str(caught.value)


def test_a_class_that_sends_messages_is_refused_with_what_to_give_instead():
    [said] = run_ranks(1, examined)
    assert re.search(r"sends messages to other ranks itself.*form for one process", said)


class OfGroups(optim.Optimizer):
    """Takes param groups with a key of its own, and nothing else."""

    def __init__(self, param_groups):
        assert all("use_muon" in group for group in param_groups)
        super().__init__(param_groups, {})


def test_a_class_that_takes_no_list_of_parameters_is_refused_by_name():
    with pytest.raises(OptimizerError, match=r"OfGroups cannot be made for a list of parameters"):
        examine(OfGroups, {}, CPU)


class Compiled(Written):
    update = torch.compile(Lion.update, fullgraph=True)


def test_a_compiled_update_is_tried_without_compiling():
    assert examine(Compiled, {}, CPU)[1] == StateCost(4, 0)


# -- no trace ----------------------------------------------------------------------------------------------------------


class Noisy(Lion):
    """Draws numbers without using them."""

    def update(self, param, grad, state):
        torch.rand(7)
        return super().update(param, grad, state)


@pytest.mark.parametrize("cls", [optim.AdamW, Noisy, optim.Adafactor, optim.LBFGS], ids=label)
def test_the_global_random_state_is_untouched(cls):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        examine(cls, {}, CPU)
    except OptimizerError:
        pass  # refused classes leave no trace either
    assert torch.equal(torch.get_rng_state(), before)


def test_the_answer_does_not_depend_on_the_callers_grad_mode():
    with torch.no_grad():
        assert examine(optim.AdamW, {}, CPU)[1] == StateCost(8, 4)
        assert not torch.is_grad_enabled()


def test_the_state_of_a_float32_parameter_costs_the_same_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert examine(optim.AdamW, {}, CPU)[1].per_element == 8
    finally:
        torch.set_default_dtype(torch.float32)


def test_settings_are_not_changed():
    kwargs = {"lr": 0.1, "betas": (0.9, 0.99)}
    examine(optim.AdamW, kwargs, CPU)
    assert kwargs == {"lr": 0.1, "betas": (0.9, 0.99)}
