"""4-bit weights of bitsandbytes (Params4bit): their quantisation constants are parameters beside them while sharded.

A weight holds two elements per byte; its `quant_state` holds what dequantises them: one absmax per 64 elements, and
where these are quantised too (double quantisation), their own absmax and an offset. The library keeps the constants in
plain tensors that no module owns, so that every rank would hold all of them. `adopt_constants` registers them as frozen
parameters of the module that owns the weight, `weight_absmax` and so on, and the quant_state refers to these same
objects: units then shard and gather them as they do the weight, and the library's own forward and backward read what
was gathered. Tables of codes, the same for all weights, stay as they are. bitsandbytes is not imported here: its
classes are known by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onefold.errors import ModelError
from onefold.model.dtensor_shards import is_dtensor

KIND, KIND_8BIT = "Params4bit", "Int8Params"  # classes of weights in bitsandbytes 0.50


class QuantState(Protocol):
    """What is asked of bitsandbytes' QuantState."""

    absmax: Tensor
    offset: Tensor | None
    state2: QuantState | None


class Constant(NamedTuple):
    """One tensor of a quant_state, as a parameter of the module that owns the weight."""

    module: nn.Module
    name: str  # in that module
    holder: QuantState  # the state, or the one nested in it
    field: str  # of the holder


def is_4bit(param: object) -> bool:
    """Whether a parameter is a 4-bit weight, also while it is guarded."""
    return any(base.__name__ == KIND for base in type(param).__mro__)


def check_quantized(name: str, param: nn.Parameter, *, flat: bool = False) -> None:
    """Raises if a quantised weight cannot be sharded as it is; with `flat`, if it cannot be in a flat buffer."""
    made_of_others: bool = is_traceable_wrapper_subclass(param)
    if made_of_others and not is_dtensor(param):
        raise ModelError(
            f"{name} is a {type(param).__name__}, a tensor made of others, for which shard() has no place; quantise "
            f"with bitsandbytes (Linear4bit), or keep the base in 16 bits"
        )
    if flat and type(param).__name__ == KIND_8BIT:
        raise ModelError(
            f"{name} is an 8-bit weight of bitsandbytes, which keeps a copy of its own that would not be sharded; use "
            f"4 bits (Linear4bit), or stage 2"
        )
    if not is_4bit(param):
        return
    state = getattr(param, "quant_state", None)
    if state is None:
        raise ModelError(
            f"{name} is a 4-bit weight that is not quantised yet, which bitsandbytes does when it is moved; call "
            f"model.to(device) before shard()"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"{name} was packed for inference on a CPU by an evaluation, and cannot train so; call shard() before the "
            f"first forward"
        )
    if param.requires_grad:
        raise ModelError(f"{name} is a 4-bit weight and cannot be trained; freeze it, and train adapters over it")


def constants(model: nn.Module) -> Iterator[Constant]:
    """Every tensor that dequantises a 4-bit weight of the model and differs from weight to weight."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            state: QuantState | None = getattr(param, "quant_state", None) if is_4bit(param) else None
            if state is not None:
                yield Constant(module, f"{name}_absmax", state, "absmax")
                if state.state2 is not None:
                    yield Constant(module, f"{name}_nested_absmax", state.state2, "absmax")
                    yield Constant(module, f"{name}_offset", state, "offset")


def keep_dtype(model: nn.Module) -> set[int]:
    """The ids of parameters whose bits are no numbers to round: 4-bit weights, whatever dtype stores them, and their
    constants, which the library wants as they are."""
    weights = {id(param) for param in model.parameters() if is_4bit(param)}
    return weights | {id(getattr(one.holder, one.field)) for one in constants(model)}


def adopt_constants(model: nn.Module) -> None:
    """Makes the constants of 4-bit weights frozen parameters; and again, if a move of the model has parted them."""
    for module, name, holder, field in constants(model):
        if name not in module._parameters:
            module.register_parameter(name, nn.Parameter(getattr(holder, field).detach(), requires_grad=False))
        setattr(holder, field, module._parameters[name])


def release_constants(model: nn.Module) -> None:
    """Gives the constants back to the quant_states as plain tensors. No unit has them any more."""
    for module, name, holder, field in constants(model):
        if (param := module._parameters.pop(name, None)) is not None:
            setattr(holder, field, param.detach())


@contextmanager
def adopted_constants(model: object) -> Iterator[None]:
    """Constants of 4-bit weights are parameters of a model while it is being sharded and, unless that fails, after."""
    if not isinstance(model, nn.Module):  # which the survey refuses
        yield
        return
    adopt_constants(model)
    try:
        yield
    except BaseException:
        release_constants(model)
        raise
