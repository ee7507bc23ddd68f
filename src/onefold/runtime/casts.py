"""Mixed precision by hooks: inputs are cast to the compute dtype, and load_state_dict() sets the fp32 masters too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.model.containers import cast_tensors
from onefold.model.dtensor_shards import is_dtensor, local_tensor, wrapped
from onefold.model.inputs import CastInputs, chosen_inputs, first_name
from onefold.runtime.engine import Engine
from onefold.runtime.uncopied import Uncopied
from onefold.state.rounding import narrowed


def attach_casts(engine: Engine) -> None:
    """Hooks that cast the model's inputs to the compute dtype, and the inputs of modules kept in fp32 to fp32, their
    outputs back; and hooks for load_state_dict()."""
    compute = engine.resolved.precision.compute
    assert isinstance(compute, torch.dtype)
    modules = dict(engine.model.named_modules())
    _attach_input_casts(engine, modules, compute)
    for kept in (modules[name] for name in engine.resolved.kept_fp32):
        widen = kept.register_forward_pre_hook(
            lambda module, args, kwargs: (cast_tensors(args, torch.float32), cast_tensors(kwargs, torch.float32)),
            with_kwargs=True,
        )
        engine.attachments.hook(widen)
        narrow = kept.register_forward_hook(lambda module, args, output: cast_tensors(output, compute))
        engine.attachments.hook(narrow)
    holding = [m for m in modules.values() if any(True for _ in m.parameters(recurse=False))]
    places = {id(param): place for param, place in zip(engine.params, engine.places, strict=True)}
    for module in holding:
        load = Uncopied(partial(_load_masters, engine, places))
        engine.attachments.hook(module.register_load_state_dict_pre_hook(load))


def _attach_input_casts(engine: Engine, modules: dict[str, nn.Module], compute: torch.dtype) -> None:
    """Hooks that cast the inputs of the root, and the first one of blocks and of layers outside them: a sum with an
    fp32 buffer is fp32 again. Modules with parameters of other dtypes are left alone."""
    chosen = engine.resolved.precision.cast_inputs
    if chosen is False:
        return
    root = CastInputs() if chosen is True else chosen_inputs(engine.model.forward, chosen)
    cast = engine.model.register_forward_pre_hook(partial(_cast, root, compute), prepend=True, with_kwargs=True)
    engine.attachments.hook(cast)
    blocks = [modules[name] for name in engine.resolved.blocks]
    inside = {id(module) for block in blocks for module in block.modules()}
    kept = {id(module) for name in engine.resolved.kept_fp32 for module in modules[name].modules()}
    layers = [m for m in modules.values() if id(m) not in inside and not any(m.children())]
    for module in (*blocks, *layers):
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}
        if module is not engine.model and id(module) not in kept and dtypes == {compute}:
            first = partial(_cast_first, first_name(module.forward), compute)
            engine.attachments.hook(module.register_forward_pre_hook(first, prepend=True, with_kwargs=True))


def _cast(
    inputs: CastInputs, dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return inputs.cast(args, kwargs, dtype)


def _cast_first(
    name: str, dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Casts the first input of a block or layer, a tensor: not tables or masks that come with it. In plain steps, since
    this becomes part of the graph of a block that is compiled."""
    given = args[0] if args else kwargs.get(name)
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dtype == dtype:
        return None
    return ((given.to(dtype), *args[1:]), kwargs) if args else (args, {**kwargs, name: given.to(dtype)})


def _units(places: dict[int, Any], module: nn.Module) -> set[int]:
    """The units of a module's own parameters, without those of its submodules."""
    return {places[id(param)].unit for param in module._parameters.values() if id(param) in places}


def _load_masters(
    engine: Engine, places: dict[int, Any], module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Before a load: sets the masters from the unsharded tensors of a state dict, and rounds these in the state dict as
    the masters round, so that the parameters get the same values. Values of parameters that were unfrozen are kept for
    the next forward, which makes their masters."""
    for index in _units(places, module):
        engine.units[index].take_edits()
    for name, param in module._parameters.items():
        value, place = state.get(prefix + name), places.get(id(param))
        if param is None or value is None or value.shape != param.shape:
            continue
        if place is None:
            if param.requires_grad and param.dtype is engine.resolved.precision.compute and value.dtype != param.dtype:
                value = _local(prefix + name, value, param).detach().to(param.device, torch.float32, copy=True)
                engine.unfreezing.keep_loaded(param, value)
                state[prefix + name] = wrapped(param, narrowed(value, param.dtype))
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
