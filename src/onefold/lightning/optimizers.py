"""The torch optimizer of a user of Lightning, as an onefold.Optimizer of the same class, groups and schedules."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from onefold import LossScale, Optimizer, OptimizerError

REACHED = (
    "zero_grad", "clip_grad_norm", "gradients", "register_gradient_hook", "add_param_group", "state_dict",
    "load_state_dict", "backward",
)  # fmt: skip


class LightningZeroOptimizer(Optimizer):
    """An Optimizer inside Lightning's wrappers.

    LightningOptimizer and Fabric's optimizer take the class of what they wrap, so that Optimizer's methods would run
    with the wrapper as `self`: those of REACHED run with what is wrapped.
    """


def _reaching(name: str) -> Any:
    method = getattr(Optimizer, name)

    @wraps(method)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return method(unwrapped(self), *args, **kwargs)

    return call


for _name in REACHED:
    setattr(LightningZeroOptimizer, _name, _reaching(_name))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper of Lightning's, which has it as `.optimizer`."""
    return getattr(optimizer, "optimizer", optimizer)


def check_apart(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises if two optimizers have a parameter in common: the later one would replace the earlier."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if seen & mine:
            raise OptimizerError(
                f"optimizer {number} of configure_optimizers ({type(optimizer).__name__}) has parameters that one "
                f"before it has, too; under Onefold give each optimizer parameters of its own"
            )
        seen |= mine


def as_sharded(model: nn.Module, given: torch.optim.Optimizer, loss_scale: LossScale | None) -> Optimizer:
    """An Optimizer of the sharded model with the class, the param groups and the settings of `given`. Collective."""
    if isinstance(given, Optimizer):
        return given
    cls = type(given)
    named = inspect.signature(cls).parameters
    settings = {key: value for key, value in given.defaults.items() if key in named}
    groups = [dict(group) for group in given.param_groups]
    return LightningZeroOptimizer(model, cls, groups=groups, loss_scale=loss_scale, **settings)


def follow(schedulers: Iterable[object], given: torch.optim.Optimizer, sharded: Optimizer) -> None:
    """Points schedulers that were made for `given`, and schedulers inside them, to the sharded optimizer."""
    if given is sharded:
        return
    found = False
    for scheduler in schedulers:
        inner = getattr(scheduler, "_schedulers", ())  # of SequentialLR and ChainedScheduler
        follow(inner, given, sharded)
        for name, value in list(vars(scheduler).items()):
            if value is given:
                setattr(scheduler, name, sharded)
                found = True
    if found:
        _count_steps(sharded)


def _count_steps(optimizer: Optimizer) -> None:
    """Lets torch see the steps of an optimizer for which no scheduler was made: else schedulers warn that it takes
    none. A scheduler does this when it is made, and also sets learning rates, which are put back."""
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def clip_by_value(optimizer: Optimizer, bound: float) -> None:
    """Clamps every element of the reduced gradients to [-bound, bound]. Collective."""
    if optimizer.precision.compute is torch.float16:
        raise OptimizerError(
            "gradient_clip_algorithm='value' would hide the overflow that fp16's loss scale looks for; use 'norm'"
        )
    for _, piece in optimizer.gradients():
        piece.clamp_(-bound, bound)
