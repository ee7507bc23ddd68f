"""A torch optimizer becomes an onefold.Optimizer of its class, settings and param groups, which accelerate steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from onefold import LossScale, Optimizer, OptimizerError
from onefold.optim.unit_optimizer import NOT_SETTINGS


class ShardedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around an onefold.Optimizer: no step and no zero_grad while gradients accumulate, and
    schedulers wait where a step was skipped. The loss scale of fp16 is the onefold.Optimizer's own."""

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._fp16 = optimizer.precision.compute is torch.float16

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were not finite: in fp16 alone, else step() raises."""
        return self._fp16 and self.optimizer.skipped > 0 and not self.optimizer.stepped


def groups_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of each param group's parameters. `names` are those of the models' parameters, by id."""
    found = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise OptimizerError(
                f"{type(optimizer).__name__} has a parameter of shape {tuple(unknown[0].shape)} that no prepared model "
                f"has; make the optimizer of the parameters of the model that prepare() gets, and give both to one "
                f"prepare() call, or prepare the model first"
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def sharded_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]], loss_scale: LossScale | None
) -> Optimizer:
    """An onefold.Optimizer for the sharded `model`, of the class and with the settings of a torch `optimizer`. `groups`
    has the names of each param group's parameters; those that are frozen are left out."""
    cls = type(optimizer)
    if isinstance(optimizer, Optimizer):
        raise OptimizerError(
            "prepare() makes the onefold.Optimizer, and got one that was made already; give it the torch optimizer, "
            "such as torch.optim.AdamW(model.parameters(), lr=...)"
        )
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32 or cls.__module__.startswith("torchao."):
        raise OptimizerError(
            f"{cls.__name__} keeps its state in few bits, in blocks of elements that shards would cut; use optim="
            f"'adamw_torch', whose state is sharded, and Zero(offload='host') where that is too large"
        )
    if any(float(one.get("step", 1)) > 0 for one in optimizer.state.values()):  # Adagrad makes its state beforehand
        raise OptimizerError(
            f"{cls.__name__} holds state of {len(optimizer.state)} parameters already, which prepare() would lose; "
            f"prepare() it first, and load its state by accelerator.load_state()"
        )
    params = dict(model.named_parameters())
    wanted: list[dict[str, Any]] = [
        {
            **{key: value for key, value in group.items() if key not in NOT_SETTINGS},
            "params": [params[name] for name in names if params[name].requires_grad],
        }
        for group, names in zip(optimizer.param_groups, groups, strict=True)
    ]
    if len(wanted) == 1 and groups[0] == list(params):  # one for all: it takes on what is unfrozen later
        made = Optimizer(model, cls, loss_scale=loss_scale, **settings_of(optimizer))
        made.param_groups[0].update((key, value) for key, value in wanted[0].items() if key != "params")
    else:
        trained = [group for group in wanted if group["params"]]
        made = Optimizer(model, cls, groups=trained, loss_scale=loss_scale, **settings_of(optimizer))
    _share_groups(optimizer, made, [bool(group["params"]) for group in wanted])
    return made


def _share_groups(optimizer: Any, made: Optimizer, trained: list[bool]) -> None:
    """Gives a torch optimizer the param groups of the onefold.Optimizer that was made of it: a scheduler that has the
    torch optimizer, wherever the script keeps that scheduler, then sets the learning rates that are trained with."""
    groups = iter(made.param_groups)
    pairs = zip(optimizer.param_groups, trained, strict=True)
    optimizer.param_groups = [next(groups) if found else group for group, found in pairs]
    optimizer._opt_called = True  # torch's schedulers warn about an optimizer that was never stepped (torch 2.13)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the class was made with, as far as its defaults say so."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    return {name: value for name, value in optimizer.defaults.items() if every or name in taken}
