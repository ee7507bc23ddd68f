"""Ties precision to a model: inputs are cast, modules kept in fp32 get fp32, and whole states reach the masters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.model.containers import cast_in
from onefold.model.dtensor_shards import held, is_split, wrapped
from onefold.runtime.engine import Engine
from onefold.state.edits import Author
from onefold.state.rounding import narrowed


def attach_casts(engine: Engine) -> None:
    """Inputs of the model are cast to what computes; modules kept in fp32 get fp32 and give back what computes."""
    compute = engine.resolved.precision.compute
    assert isinstance(compute, torch.dtype)
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: (cast_in(args, compute), cast_in(kwargs, compute)), prepend=True, with_kwargs=True
    )
    modules = dict(engine.model.named_modules())
    for kept in (modules[name] for name in engine.resolved.kept_fp32):
        kept.register_forward_pre_hook(
            lambda module, args, kwargs: (cast_in(args, torch.float32), cast_in(kwargs, torch.float32)),
            with_kwargs=True,
        )
        kept.register_forward_hook(lambda module, args, output: cast_in(output, compute))
    holding = [m for m in modules.values() if any(True for _ in m.parameters(recurse=False))]
    places = {id(param): place for param, place in zip(engine.params, engine.places, strict=True)}
    for module in holding:
        module.register_load_state_dict_pre_hook(partial(_load_masters, engine, places))
        module.register_load_state_dict_post_hook(partial(_know_loaded, engine, places))


def _know_loaded(engine: Engine, places: dict[int, Any], module: nn.Module, keys: Any) -> None:
    for index in _units(places, module):
        engine.units[index].edits.accept(Author.LOAD)


def _units(places: dict[int, Any], module: nn.Module) -> set[int]:
    """Those that hold parameters of a module itself."""
    return {places[id(param)].unit for param in module._parameters.values() if id(param) in places}


def _load_masters(
    engine: Engine, places: dict[int, Any], module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Whole values of a state dict go to the master in full, and to the parameters as the master rounds them."""
    for index in _units(places, module):
        engine.units[index].take_edits()
    for name, param in module._parameters.items():
        value, place = state.get(prefix + name), places.get(id(param))
        if param is None or value is None or place is None or value.shape != param.shape:
            continue
        unit = engine.units[place.unit]
        if unit.dtypes.narrow:
            value = _local(prefix + name, value, param).to(device=param.device, dtype=torch.float32)
            with torch.no_grad():
                unit.load_master(place.slot, value)
            state[prefix + name] = wrapped(param, narrowed(value, unit.dtypes.compute))


def _local(name: str, value: Any, param: Any) -> Tensor:
    if is_split(param) and getattr(value, "placements", None) != param.placements:
        raise StateError(
            f"{name} is split over the ranks of 'tp' and the state has it in another way; use onefold.load, which cuts "
            f"whole tensors, or load DTensors with placements {param.placements}"
        )
    return held(value)
