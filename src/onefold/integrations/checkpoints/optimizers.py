"""Which torch class an imported optimizer state belongs to, and that state in the form in which the class keeps it.

Neither torch nor DeepSpeed writes the class down. It is told from the names of the settings and of the state, or from
DeepSpeed's configuration; where two classes fit, the user names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onefold.errors import CheckpointError, ConfigError
from onefold.integrations.checkpoints.foreign import Foreign, ForeignGroup, ForeignTensor
from onefold.integrations.checkpoints.pickled import StoredTensor
from onefold.optim.elementwise import first_state

CLASSES = ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
EXECUTION = ("foreach", "fused", "capturable", "differentiable")  # how this machine computes: the user's choice
ADAMS = ("AdamW", "Adam")
OF_DEEPSPEED = {"bias_correction": True}  # settings of its Adam that torch's has not, and what they must be
NOT_TOLD = ("params", "param_names", "initial_lr", "name", "step", "swa_lr")  # says nothing about the class


def class_of(found: Foreign, asked: str | None) -> type[torch.optim.Optimizer]:
    """The torch class whose state this is: as asked, or as the settings and the state tell."""
    assert found.groups is not None
    if asked is not None:
        known = getattr(torch.optim, asked, None)
        if not (isinstance(known, type) and issubclass(known, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer={asked!r} is no class of torch.optim; use one of {', '.join(CLASSES)}")
        return known
    settings = {key for group in found.groups for key in group.settings} - set(NOT_TOLD)
    states = {key for one in found.tensors for key in (*one.states, *one.singles)}
    fits = {name: _defaults(name) for name in CLASSES if _fits(name, settings - set(OF_DEEPSPEED), states)}
    exact = [name for name, defaults in fits.items() if settings == defaults]
    left = exact or list(fits)
    if set(left) == set(ADAMS):
        left = _which_adam(found)
    if len(left) != 1:
        what = f"fits {' and '.join(left)}" if left else "is of no class that Onefold knows"
        raise CheckpointError(
            f"the optimizer state ({', '.join(sorted(states)) or 'none'}; settings {', '.join(sorted(settings))}) "
            f"{what}; name the torch class with --optimizer (optimizer= in Python), or import weights only with "
            f"--weights-only"
        )
    made: type[torch.optim.Optimizer] = getattr(torch.optim, left[0])
    return made


def _which_adam(found: Foreign) -> list[str]:
    """AdamW and Adam have the same state. Newer versions of torch say which it was; so may DeepSpeed's file."""
    assert found.groups is not None
    told = {group.settings.get("decoupled_weight_decay") for group in found.groups}
    if told in ({True}, {False}):
        return ["AdamW" if True in told else "Adam"]
    block = found.config.get("optimizer")
    if isinstance(block, dict) and str(block.get("type")).lower() in ("adam", "adamw"):
        params = block.get("params")
        decoupled = str(block["type"]).lower() == "adamw" or not isinstance(params, dict)
        return ["AdamW" if decoupled or (params or {}).get("adam_w_mode", True) else "Adam"]
    return list(ADAMS)


def _defaults(name: str) -> set[str]:
    return set(_made(name).defaults)


def _made(name: str) -> torch.optim.Optimizer:
    cls: Any = getattr(torch.optim, name)
    made: torch.optim.Optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **({"lr": 1e-3} if name == "SGD" else {}))
    return made


def _fits(name: str, settings: set[str], states: set[str]) -> bool:
    """Whether the class knows all these settings, and has this state if there is any."""
    wanted = {"SGD": {"momentum_buffer"}}.get(name) or set(_like(getattr(torch.optim, name), {}))
    more = {"max_exp_avg_sq", "grad_avg", "momentum_buffer"} if name in (*ADAMS, "RMSprop") else set()
    return settings <= _defaults(name) and states <= wanted | more and (name == "SGD" or not states or wanted <= states)


def _like(cls: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> dict[str, Any]:
    needed = {"lr": 1e-3} if cls is torch.optim.SGD else {}
    kept = {key: value for key, value in settings.items() if key not in EXECUTION}
    return first_state(cls, needed, kept, torch.device("cpu"), torch.float32)


def in_form_of(cls: type[torch.optim.Optimizer], found: Foreign) -> Foreign:
    """The same with settings that the class has, and single values as the class keeps them."""
    assert found.groups is not None
    known = set(_made(cls.__name__).defaults) | {"initial_lr"}
    groups = []
    like: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(found.groups):
        for key, wanted in OF_DEEPSPEED.items():
            if group.settings.get(key, wanted) != wanted:
                raise CheckpointError(
                    f"param group {number} has {key}={group.settings[key]}; {cls.__name__} has no such"
                )
        kept = {key: _value(value) for key, value in group.settings.items() if key in known - set(EXECUTION)}
        groups.append(ForeignGroup(group.names, kept))
        like |= dict.fromkeys(group.names, _like(cls, kept))
    return replace(found, groups=groups, tensors=list(_formed(cls.__name__, found.tensors, like)))


def _value(value: Any) -> Any:
    return value.value() if isinstance(value, StoredTensor) else value


def _formed(name: str, tensors: Sequence[ForeignTensor], like: Mapping[str, dict[str, Any]]) -> Iterator[ForeignTensor]:
    for one in tensors:
        wanted, has = like.get(one.name, {}), {*one.states, *one.singles}
        if has and has != set(wanted):
            raise CheckpointError(
                f"{one.name} has the state {', '.join(sorted(has))}; {name} with these settings keeps "
                f"{', '.join(sorted(wanted)) or 'none'}; name the torch class that was trained with --optimizer"
            )
        yield replace(one, singles={key: _single(value, wanted[key]) for key, value in one.singles.items()})


def _single(value: Any, like: Any) -> Any:
    number = value.value().item() if isinstance(value, StoredTensor) else value
    if isinstance(like, Tensor) and isinstance(number, int | float):
        return torch.tensor(number, dtype=like.dtype)
    return int(number) if isinstance(like, int) and isinstance(number, float) else number


def defaults_of(name: str) -> dict[str, Any]:
    """The default settings of a torch class; none of any other class."""
    return dict(_made(name).defaults) if name in CLASSES else {}
