"""Mixed precision by hooks: inputs are cast to the compute dtype, and load_state_dict() sets the fp32 masters too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.model.containers import cast_tensors
from onefold.model.dtensor_shards import is_dtensor, local_tensor, wrapped
from onefold.runtime.engine import Engine
from onefold.runtime.uncopied import Uncopied
from onefold.state.rounding import narrowed


def attach_casts(engine: Engine) -> None:
    """Hooks that cast the model's inputs to the compute dtype, and the inputs of modules kept in fp32 to fp32, their
    outputs back; and hooks for load_state_dict()."""
    compute = engine.resolved.precision.compute
    assert isinstance(compute, torch.dtype)
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: (cast_tensors(args, compute), cast_tensors(kwargs, compute)),
        prepend=True,
        with_kwargs=True,
    )
    modules = dict(engine.model.named_modules())
    for kept in (modules[name] for name in engine.resolved.kept_fp32):
        kept.register_forward_pre_hook(
            lambda module, args, kwargs: (cast_tensors(args, torch.float32), cast_tensors(kwargs, torch.float32)),
            with_kwargs=True,
        )
        kept.register_forward_hook(lambda module, args, output: cast_tensors(output, compute))
    holding = [m for m in modules.values() if any(True for _ in m.parameters(recurse=False))]
    places = {id(param): place for param, place in zip(engine.params, engine.places, strict=True)}
    for module in holding:
        module.register_load_state_dict_pre_hook(Uncopied(partial(_load_masters, engine, places)))


def _units(places: dict[int, Any], module: nn.Module) -> set[int]:
    """The units of a module's own parameters, without those of its submodules."""
    return {places[id(param)].unit for param in module._parameters.values() if id(param) in places}


def _load_masters(
    engine: Engine, places: dict[int, Any], module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Before a load: sets the masters from the unsharded tensors of a state dict, and rounds these in the state dict as
    the masters round, so that the parameters get the same values."""
    for index in _units(places, module):
        engine.units[index].take_edits()
    for name, param in module._parameters.items():
        value, place = state.get(prefix + name), places.get(id(param))
        if param is None or value is None or place is None or value.shape != param.shape:
            continue
        unit = engine.units[place.unit]
        if unit.dtypes.narrow:
            value = _local(prefix + name, value, param).detach()
            dtype = value.dtype if value.dtype is unit.dtypes.compute else torch.float32
            value = value.to(device=param.device, dtype=dtype)
            with torch.no_grad():
                unit.load_master(place.slot, value)
            state[prefix + name] = wrapped(param, narrowed(value, unit.dtypes.compute))


def _local(name: str, value: Any, param: Any) -> Tensor:
    if is_dtensor(param) and getattr(value, "placements", None) != param.placements:
        raise StateError(
            f"{name} is split over the ranks of 'tp', but not in the state dict; use onefold.load, which splits full "
            f"tensors, or load DTensors with placements {param.placements}"
        )
    return local_tensor(value)
