"""Whether an optimizer class is element-wise, found by running it on some numbers instead of from a list of names.

Shards cut parameters anywhere, so an optimizer can run on a shard only if every element's update depends on that
element's own history. (Classes that need one whole tensor at a time: whole_trial.py.) The class updates small matrices,
and the same numbers cut into two vectors, each with an optimizer of its own; the results must agree after every step.
LAMB, LARS and Adafactor scale by norms of whole tensors and differ; Muon needs matrices; LBFGS needs a closure; state
in 8 bits is scaled by blocks of elements, which the two vectors cut; Shampoo keeps matrices of other shapes. The same
run shows how many bytes of optimizer state the class keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.cost.layout import ALIGN
from onefold.cost.states import StateCost, check_form
from onefold.errors import ConfigError, OptimizerError
from onefold.optim.kernels.rule import knows
from onefold.optim.trials import GRADIENTS, REMEDY, SendsMessages, alike, group_settings, on_numbers, trained
from onefold.optim.whole_trial import examine_whole

# Matrices that are cut into two vectors. First a small one: a class that makes matrices of its vectors is found out in
# little time. Then longer vectors: smaller ones keep 32 bits in 8-bit optimizers, and blocks of 256 must not fit. Then
# one with long sides: Adafactor and others factor no matrix that has a shorter side than 128.
SHAPES = ((2, ALIGN), (2, 65 * ALIGN), (260, 2 * ALIGN))


class NotElementwise(OptimizerError):
    """The class needs more than single elements; it may need no more than one whole tensor."""


@on_numbers()
def examine(
    cls: Any, kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], StateCost]:
    """The class's default hyperparameters and the bytes of its state; raises unless the class is element-wise."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise OptimizerError(
            f"{cls!r} is not an optimizer class; pass a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, "
            f"and its settings as keywords"
        )
    for shape in SHAPES:
        optimizer, part, half, changed = _try(cls, kwargs, device, dtype, shape)
    if changed:
        raise OptimizerError(
            f"{cls.__name__} keeps state in its param group ({', '.join(changed)}), but every unit has a param group "
            f"of its own, so that state would differ between units. {REMEDY}"
        )
    return dict(optimizer.defaults), _cost(dict(part.state[half]), half.numel())


def _try(
    cls: Any, kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, nn.Parameter, list[str]]:
    """Updates a matrix whole and in two halves; raises unless the results agree. The optimizer of both, of the last
    half and the half itself, and settings that the first has changed."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=dtype)
    grads = [torch.randn(shape, generator=generator, dtype=dtype) * size for size in GRADIENTS]
    whole = nn.Parameter(values.to(device, copy=True))
    halves = [nn.Parameter(row.to(device, copy=True)) for row in values.view(2, -1)]
    try:
        optimizer = cls([whole], **kwargs)
    except (TypeError, ValueError) as error:
        raise OptimizerError(f"{cls.__name__} refused its settings {kwargs}: {error}") from error
    except Exception as error:
        raise OptimizerError(
            f"{cls.__name__} cannot be made for a list of parameters and the settings {kwargs}: {error!r}; a class "
            f"that wants param groups with keys of its own does not work: give its settings as keywords"
        ) from error
    try:
        before = group_settings(optimizer)
        seen, apart = trained(optimizer, [whole], [[grad] for grad in grads]), []
        for i, half in enumerate(halves):  # one optimizer each, as units have
            part = cls([half], **kwargs)
            apart.append(trained(part, [half], [[grad.view(2, -1)[i]] for grad in grads]))
    except SendsMessages:
        raise
    except Exception as error:
        raise NotElementwise(
            f"{cls.__name__} cannot update 1-D vectors, which is what a sharded unit is made of: {error}. {REMEDY}"
        ) from error
    if not alike(seen, [torch.cat(rows) for rows in zip(*apart, strict=True)]):
        raise NotElementwise(
            f"{cls.__name__} is not element-wise: a tensor updated whole and the same tensor updated in two halves got "
            f"different values, and a shard is a part of a tensor. {REMEDY}"
        )
    if odd := _odd_state(optimizer, whole):
        raise NotElementwise(
            f"{cls.__name__} keeps state ({odd}) that is neither one number for each element nor one for the tensor, "
            f"and which a shard, a part of a tensor, cannot have. {REMEDY}"
        )
    return optimizer, part, half, [key for key, value in group_settings(optimizer).items() if before.get(key) != value]


def _odd_state(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> str:
    """The names of state of other shapes: a class may keep it from the start and use it in later steps only."""
    state = optimizer.state[param].items()
    leaves = [(key, leaf) for key, value in state for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return ", ".join(dict.fromkeys(str(key) for key, leaf in leaves if leaf.numel() not in (0, 1, param.numel())))


@on_numbers()
def first_state(
    cls: Any, kwargs: dict[str, Any], settings: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The state that the class makes for a vector at its first update; read for its names, dtypes and devices."""
    return _state_after((1.0,), cls, kwargs, settings, device, dtype)


@on_numbers()
def cost_with(
    cls: Any, kwargs: dict[str, Any], settings: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> StateCost:
    """The bytes of state that the class keeps for parameters of a param group with these settings, found by running
    it."""
    return _cost(_state_after(GRADIENTS, cls, kwargs, settings, device, dtype), ALIGN)


def _state_after(
    sizes: Sequence[float], cls: Any, kwargs: dict[str, Any], settings: dict[str, Any], device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """The state of a vector of ALIGN elements after steps whose gradients have these sizes."""
    param = nn.Parameter(torch.zeros(ALIGN, dtype=dtype, device=device))
    optimizer = cls([param], **kwargs)
    optimizer.param_groups[0].update(settings)
    trained(optimizer, [param], [[torch.full((ALIGN,), size, dtype=dtype)] for size in sizes])
    return dict(optimizer.state[param])


def _cost(state: dict[str, Any], numel: int) -> StateCost:
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    per_element = sum(t.itemsize for t in tensors if t.numel() == numel)
    return StateCost(per_element, sum(t.nbytes for t in tensors if t.numel() != numel))


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def cost_of(
    optimizer: str | type[torch.optim.Optimizer], settings: dict[str, Any] | None = None, state: str = "fp32"
) -> StateCost:
    """The bytes of state that an optimizer class keeps, found by running it, with its moments in the form `state`. Of a
    class that needs whole tensors, state that has another shape than its tensor (Shampoo's matrices) is counted as for
    a small tensor.

    >>> cost_of("adamw").per_element
    8
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer {optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}, muon, or a class"
            )
        optimizer, defaults = OPTIMIZERS[optimizer.lower()]
        settings = {**defaults, **(settings or {})}
    given = optimizer, settings or {}, torch.device("cpu")
    try:
        settled, cost = examine(*given)
    except NotElementwise:
        settled, cost = examine_whole(*given)
        cost = cost._replace(whole=True)
    known = knows(optimizer, settled)
    check_form(state, optimizer.__name__, known=known)
    return cost._replace(one_pass=known).in_form(state)
