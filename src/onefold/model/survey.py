"""A look at a model, without touching it: what it holds, which units it makes, and whether it can be sharded at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.mesh import Axes
from onefold.cost.layout import ParamInfo, UnitLayout, blocks_of, plan_units
from onefold.errors import ConfigError, ModelError
from onefold.model.blocks import block_of, find_blocks
from onefold.model.device import check_device
from onefold.model.dtensor_shards import check, local_tensor, split_info
from onefold.model.inputs import chosen_inputs
from onefold.model.mixing import check_mixing
from onefold.model.quantized import check_quantized, keep_dtype
from onefold.model.storage import dense_stride
from onefold.model.unit_spec import UnitSpec, place
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero

ATTRIBUTE = "_onefold"  # of a sharded model: its engine
TRAINED_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found in a model, before ranks have agreed on it and before anything automatic is decided."""

    settings: Zero
    meta: bool = False  # built on the meta device, to be filled in shard()
    params: tuple[ParamInfo, ...] = ()  # all parameters, in registration order
    units: tuple[UnitSpec, ...] = ()  # placed as the settings say
    blocks: tuple[str, ...] = ()  # names of modules
    kept_fp32: tuple[str, ...] = ()  # names of modules
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of all parameters, as they are
    lines: tuple[str, ...] = ()  # what all ranks must agree on
    mistake: Exception | None = None  # that ended the survey: raised once all ranks have heard of it


def survey_or_mistake(model: nn.Module, zero: Zero | None, fields: dict[str, Any], axes: Axes) -> Survey:
    """Parse the settings of shard() and survey the model; what is raised is kept, as other ranks must hear of it."""
    settings = Zero()
    try:
        settings = Zero.of(zero, fields)
        if axes.sequence.size > 1:
            if axes.pp.size > 1:
                raise ConfigError(
                    'a mesh with both "sequence" and "pp" is unsupported: a pipeline stage would have to cut the '
                    "batches of its schedule; use one of the two axes"
                )
            check_mixing(model)
        return survey(model, settings, axes.shard.size, axes.replica.size, axes.tp.world_ranks)
    except Exception as mistake:
        return Survey(settings=settings, mistake=mistake)


def survey(model: nn.Module, settings: Zero, ranks: int, replicas: int = 1, tp_ranks: Sequence[int] = ()) -> Survey:
    """Looks at a model without touching it; raises if it cannot be sharded. Of parameters split over "tp", sizes are
    those of this rank's part."""
    _check_unsharded(model)
    named = list(model.named_parameters())
    if not named:
        raise ModelError(f"{type(model).__name__} has no parameters: nothing to shard")
    device, meta = _device(named, settings)
    for name, tensor in [*named, *model.named_buffers()]:
        _check_values(name, tensor, meta)
        check(name, tensor, tp_ranks)
    check_device(settings.device)
    policy = Precision.of(settings.precision)
    if isinstance(policy.cast_inputs, tuple):
        chosen_inputs(model.forward, policy.cast_inputs)  # raises if there is no such input
    kept_fp32, modules = policy.kept(model), dict(model.named_modules())
    kept = {id(param) for name in kept_fp32 for param in modules[name].parameters()} | keep_dtype(model)
    dtypes = {name: _target(param, policy, id(param) in kept) for name, param in named}
    for name, param in named:
        _check_parameter(name, param, param.device if meta and param.is_meta else device, policy)
    if not meta:
        _check_overlap([*named, *model.named_buffers()])
    if settings.init is not None and not meta:
        raise ConfigError("init= fills a model built on the meta device, and this one has values: build it on meta")
    blocks = find_blocks(model, settings.units)
    params = [
        ParamInfo(
            name, local_tensor(param).numel(), dtypes[name].itemsize, _kind(param, dtypes[name]), block_of(name, blocks)
        )
        for name, param in named
    ]
    layouts = plan_units(params, ranks, settings.bucket_bytes, replicas, shared_bytes=settings.shared_bytes)
    units = _units(layouts, params, dict(named), dtypes, settings)
    flat = {slot.name for unit in units if unit.flat for slot in unit.layout.slots}
    for name, param in named:
        check_quantized(name, param, flat=name in flat)
    lines = settings.describe() + [
        f"parameter {split_info(name, param)}, strides {dense_stride(param)}, {dtypes[name]}" for name, param in named
    ]
    lines += [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit {unit.layout.name}: {unit.layout.numel} elements, {unit.placement}" for unit in units]
    _check_activations(settings.activations, blocks, len(tp_ranks))
    _check_compile(model, settings, blocks)
    for name in settings.methods:
        if name == "forward" or not callable(getattr(model, name, None)):
            raise ModelError(f"methods= names {name!r}, no method of {type(model).__name__} other than forward")
    return Survey(
        settings=settings, meta=meta, params=tuple(params), units=units, blocks=tuple(blocks),
        kept_fp32=tuple(kept_fp32), dtypes={name: param.dtype for name, param in named},
        lines=tuple(lines),
    )  # fmt: skip


def _device(named: Sequence[tuple[str, nn.Parameter]], settings: Zero) -> tuple[torch.device, bool]:
    """The device that parameters are on, and whether some are to be filled. Where `init` has values by name, a model
    may be partly on the meta device: what is real keeps its values."""
    first = next((param for _, param in named if param.requires_grad), named[0][1]).device
    if not isinstance(settings.init, Mapping):
        return first, first.type == "meta"
    real = (param.device for _, param in named if param.device.type != "meta")
    return next(real, first), any(param.device.type == "meta" for _, param in named)


def _units(
    layouts: Sequence[UnitLayout],
    params: Sequence[ParamInfo],
    named: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
    settings: Zero,
) -> tuple[UnitSpec, ...]:
    """A unit's parameters have one dtype and are trained or frozen together: as the first one."""
    infos = {info.name: info for info in params}
    units = []
    for layout in layouts:
        first = layout.slots[0].name
        trained = named[first].requires_grad
        placement = place(layout, settings)
        blocks = blocks_of([infos[slot.name] for slot in layout.slots])
        units.append(UnitSpec(layout=layout, placement=placement, dtype=dtypes[first], trained=trained, blocks=blocks))
    return tuple(units)


def _check_activations(policy: str, blocks: Sequence[str], tp: int) -> None:
    """Raises if activations= cannot be honoured for this model."""
    if policy != "keep" and not blocks:
        raise ConfigError(
            f"activations={policy!r} computes blocks again, and this model has none: no list of two or more modules of "
            f"one class; name them with units="
        )
    if policy.startswith("partition") and tp <= 1:
        raise ConfigError(
            f"activations={policy!r} shares block inputs among the ranks of the mesh axis 'tp', and there is none, or "
            f"of one rank; give mesh= such an axis, or use {policy.replace('partition', 'checkpoint')!r}"
        )


def _check_compile(model: nn.Module, settings: Zero, blocks: Sequence[str]) -> None:
    """Raises if compile= cannot be honoured for this model."""
    if settings.compile_options is None:
        return
    if not blocks:
        raise ConfigError(
            "compile= compiles blocks, and this model has none: no list of two or more modules of one class; name them "
            "with units=, or compile the whole model: torch.compile(model)"
        )
    try:
        torch.compile(model.forward, **settings.compile_options)  # compiles nothing before it is called
    except Exception as error:
        raise ConfigError(f"torch.compile refuses compile={settings.compile!r}: {error}") from error


def _check_unsharded(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() wants a torch.nn.Module, found {type(model).__name__}")
    for name, module in model.named_modules():
        if ATTRIBUTE in module.__dict__:
            where = f"its part {name!r}" if name else "it"
            raise ModelError(f"this model was sharded before ({where}); call shard() once, on the outermost model")
    for name, param in model.named_parameters():
        hooks = (param._post_accumulate_grad_hooks or {}).values()
        if any(getattr(hook, ATTRIBUTE, lambda: None)() is not None for hook in hooks):
            raise ModelError(
                f"{name} is a parameter of another sharded model too, in whose flat buffer it is; put both models into "
                f"one module and shard that, or give each a copy"
            )


def _check_values(name: str, tensor: Tensor, meta: bool) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet (a lazy module); run one forward before shard()")
    if tensor.device.type == "meta" and not meta:
        raise ModelError(
            f"{name} is on the meta device and others are not; build all of it there, or all on a real device"
        )


def _check_overlap(named: list[tuple[str, Tensor]]) -> None:
    """Raises if two names share memory without being one Parameter: shard() would untie them."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in ((name, local_tensor(tensor)) for name, tensor in named):
        if tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            start = int(tensor.storage_offset())
            stop = start + int(extent)
            for other_start, other_stop, other in seen.setdefault(tensor.untyped_storage()._cdata, []):
                if start < other_stop and other_start < stop:
                    raise ModelError(
                        f"{other} and {name} share memory but are not one parameter, and shard() would part them; tie "
                        f"weights by assigning the same nn.Parameter, or clone one of them"
                    )
            seen[tensor.untyped_storage()._cdata].append((start, stop, name))


def _target(param: nn.Parameter, policy: Precision, kept: bool) -> torch.dtype:
    """What a parameter computes in: fp32 ones in the policy's dtype unless they are kept, all others in their own."""
    assert isinstance(policy.compute, torch.dtype)
    return policy.compute if param.dtype is torch.float32 and not kept else param.dtype


def _check_parameter(name: str, param: nn.Parameter, device: torch.device, policy: Precision) -> None:
    if param.device != device:
        raise ModelError(f"{name} is on {param.device}, others on {device}; move the model to one device first")
    if param.requires_grad:
        check_trainable(name, param, policy)


def check_trainable(name: str, param: nn.Parameter, policy: Precision) -> None:
    """Raises if a parameter has a dtype that cannot be trained."""
    check_quantized(name, param)
    if param.dtype not in TRAINED_DTYPES and param.dtype is not policy.compute:
        remedy = "keep it as two real ones (torch.view_as_real)" if param.is_complex() else "call model.float() first"
        raise ModelError(
            f"{name} is {param.dtype}; trained parameters are float32 or float64 (precision= casts them): {remedy}, "
            f"or freeze it with requires_grad_(False)"
        )


def _kind(param: nn.Parameter, dtype: torch.dtype) -> str:
    return str(dtype) if param.requires_grad else f"{dtype} frozen"
