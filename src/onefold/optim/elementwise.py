"""Whether an optimizer class is element-wise, found by running it on some numbers instead of from a list of names.

Shards cut parameters anywhere, so an optimizer can run on a shard only if every element's update depends on that
element's own history. The class updates one small matrix, and the same numbers cut into two vectors, each with an
optimizer of its own; the results must agree. LAMB, LARS and Adafactor scale by norms of whole tensors and differ; Muon
needs matrices; LBFGS needs a closure; state in 8 bits is scaled by blocks of elements, which the two vectors cut.
The same run shows how many bytes of optimizer state the class keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.cost.layout import ALIGN
from onefold.cost.states import StateCost
from onefold.errors import ConfigError, OptimizerError
from onefold.optim.kernels.rule import knows

STEPS = 3
NUMEL = 65 * ALIGN  # of each vector: smaller ones keep 32 bits in 8-bit optimizers, and blocks of 256 must not fit
REMEDY = "Use an element-wise class: SGD, Adam, AdamW, Adagrad, RMSprop, NAdam"


def examine(
    cls: Any, kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], StateCost]:
    """The class's default hyperparameters and the bytes of its state; raises unless the class is element-wise."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise OptimizerError(
            f"{cls!r} is not an optimizer class; pass a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, "
            f"and its settings as keywords"
        )
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, NUMEL, generator=generator, dtype=dtype)
    grads = [torch.randn(2, NUMEL, generator=generator, dtype=dtype) * 10.0**-step for step in range(STEPS)]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        whole = nn.Parameter(values.to(device, copy=True))
        halves = [nn.Parameter(row.to(device, copy=True)) for row in values]
        try:
            optimizer = cls([whole], **kwargs)
        except (TypeError, ValueError) as error:
            raise OptimizerError(f"{cls.__name__} refused its settings {kwargs}: {error}") from error
        try:
            before = _group_settings(optimizer)
            _train(optimizer, whole, grads)
            for i, half in enumerate(halves):  # one optimizer each, as units have
                part = cls([half], **kwargs)
                _train(part, half, [grad[i] for grad in grads])
        except Exception as error:
            raise OptimizerError(
                f"{cls.__name__} cannot update 1-D vectors, which is what a sharded unit is made of: {error}. {REMEDY}"
            ) from error
    if not torch.allclose(
        whole.detach(), torch.stack([h.detach() for h in halves]), rtol=1e-5, atol=1e-7, equal_nan=True
    ):
        raise OptimizerError(
            f"{cls.__name__} is not element-wise: a tensor updated whole and the same tensor updated in two halves got "
            f"different values, and a shard is a part of a tensor. {REMEDY}"
        )
    if changed := [key for key, value in _group_settings(optimizer).items() if before.get(key) != value]:
        raise OptimizerError(
            f"{cls.__name__} keeps state in its param group ({', '.join(changed)}), but every unit has a param group "
            f"of its own, so that state would differ between units. {REMEDY}"
        )
    return dict(optimizer.defaults), _cost(part, half)


def first_state(
    cls: Any, kwargs: dict[str, Any], settings: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The state that the class makes for a vector at its first update; read for its names, dtypes and devices."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        param = nn.Parameter(torch.zeros(ALIGN, dtype=dtype, device=device))
        optimizer = cls([param], **kwargs)
        optimizer.param_groups[0].update(settings)
        _train(optimizer, param, [torch.ones(ALIGN, dtype=dtype)])
    return dict(optimizer.state[param])


def _train(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.to(param.device, copy=True)
        bare_step(optimizer)


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps without the hooks and profiler ranges that torch adds: those are for the Optimizer that users call."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _group_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"}


def _cost(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> StateCost:
    tensors = [leaf for leaf in tree_leaves(dict(optimizer.state[param])) if isinstance(leaf, Tensor)]
    per_element = sum(t.itemsize for t in tensors if t.numel() == param.numel())
    return StateCost(per_element, sum(t.nbytes for t in tensors if t.numel() != param.numel()))


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def cost_of(optimizer: str | type[torch.optim.Optimizer], settings: dict[str, Any] | None = None) -> StateCost:
    """The bytes of state that an optimizer class keeps, found by running it.

    >>> cost_of("adamw").per_element
    8
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ConfigError(f"optimizer {optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}, or a class")
        optimizer, defaults = OPTIMIZERS[optimizer.lower()]
        settings = {**defaults, **(settings or {})}
    settled, cost = examine(optimizer, settings or {}, torch.device("cpu"))
    return cost._replace(one_pass=knows(optimizer, settled))
