"""A look at a model, without touching it: what it holds, which units it makes, and whether it can be sharded at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onefold.cost.layout import ParamInfo, UnitLayout, plan_units
from onefold.errors import ConfigError, ModelError
from onefold.model.blocks import block_of, find_blocks
from onefold.model.dtensor_shards import check, local_tensor, split_info
from onefold.model.storage import dense_stride
from onefold.settings.offload import Offload
from onefold.settings.placement import STAGES, Placement, Scope, Tier
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero

ATTRIBUTE = "_onefold"  # of a sharded model: its engine
FROZEN = "frozen"
NOTHING: Mapping[str, Tier] = MappingProxyType({})
TRAINED_DTYPES = (torch.float32, torch.float64)


class Survey(NamedTuple):
    """What was found in a model."""

    trained: list[tuple[str, nn.Parameter]]
    frozen: list[tuple[str, nn.Parameter]]
    meta: bool  # built on the meta device, to be filled here
    dtypes: dict[str, torch.dtype]  # what each parameter computes in
    infos: list[ParamInfo]
    layouts: list[UnitLayout]
    lines: list[str]  # what all ranks must agree on


def place_all(settings: Zero) -> Placement:
    """The row of the table for most units. As long as "auto" is undecided, any will do to compare ranks."""
    offload = Offload.of(settings.offload)
    return STAGES[3 if settings.stage == "auto" else settings.stage].on(offload.optimizer_tier, offload.parameters_tier)


def place(layout: UnitLayout, settings: Zero, ranks: int, decided: Mapping[str, Tier] = NOTHING) -> Placement:
    """The row of the placement table for one unit: small ones may keep their parameters whole, and where the optimizer
    state of some units is may be `decided` (Offload(optimizer="auto"))."""
    placement = place_all(settings)
    if layout.name in decided:
        placement = placement.on(decided[layout.name], placement.parameters_tier)
    placement = placement.over(ranks)
    keep = settings.keep_whole
    small = keep(layout.name, layout.used_numel) if callable(keep) else layout.used_numel <= keep
    return (
        placement._replace(parameters=Scope.REPLICATED, parameters_tier=Tier.DEVICE, late=False) if small else placement
    )


def survey(model: nn.Module, settings: Zero, ranks: int, replicas: int = 1, tp_ranks: Sequence[int] = ()) -> Survey:
    """Look at a model without touching it; raises what makes it unfit. Of what is split over "tp", the parts here."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() wants a torch.nn.Module, found {type(model).__name__}")
    for name, module in model.named_modules():
        if ATTRIBUTE in module.__dict__:
            where = f"its part {name!r}" if name else "it"
            raise ModelError(f"this model was sharded before ({where}); call shard() once, on the outermost model")
    named = list(model.named_parameters())
    trained = [(name, param) for name, param in named if param.requires_grad]
    frozen = [(name, param) for name, param in named if not param.requires_grad]
    if not trained:
        raise ModelError(
            f"{type(model).__name__} has no parameter that requires grad ({len(frozen)} frozen): nothing to shard"
        )
    device = trained[0][1].device
    meta = device.type == "meta"
    for name, tensor in [*named, *model.named_buffers()]:
        _check_values(name, tensor, meta)
        check(name, tensor, tp_ranks)
    policy = Precision.of(settings.precision)
    kept = {id(param) for module in policy.kept(model) for param in module.parameters()}
    dtypes = {name: _target(param, policy, id(param) in kept) for name, param in named}
    for name, param in named:
        _check_parameter(name, param, device, policy)
    if not meta:
        _check_overlap([*named, *model.named_buffers()])
    if settings.init is not None and not meta:
        raise ConfigError("init= fills a model built on the meta device, and this one has values: build it on meta")
    blocks = find_blocks(model, settings.units)
    infos = [
        ParamInfo(
            name, local_tensor(param).numel(), dtypes[name].itemsize, _kind(param, dtypes[name]), block_of(name, blocks)
        )
        for name, param in named
    ]
    layouts = plan_units(infos, ranks, settings.bucket_bytes, replicas)
    lines = settings.describe() + [
        f"parameter {split_info(name, param)}, strides {dense_stride(param)}, {dtypes[name]}" for name, param in named
    ]
    lines += [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit {unit.name}: {unit.numel} elements, {place(unit, settings, ranks)}" for unit in layouts]
    return Survey(trained, frozen, meta, dtypes, infos, layouts, lines)


def _check_values(name: str, tensor: Tensor, meta: bool) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet (a lazy module); run one forward before shard()")
    if tensor.device.type == "meta" and not meta:
        raise ModelError(
            f"{name} is on the meta device and others are not; build all of it there, or all on a real device"
        )


def _check_overlap(named: list[tuple[str, Tensor]]) -> None:
    """Memory shared by two names that are not one Parameter would be parted silently."""
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
    if param.requires_grad and param.dtype not in TRAINED_DTYPES and param.dtype is not policy.compute:
        remedy = "keep it as two real ones (torch.view_as_real)" if param.is_complex() else "call model.float() first"
        raise ModelError(
            f"{name} is {param.dtype}; trained parameters are float32 or float64 (precision= casts them): {remedy}, "
            f"or freeze it with requires_grad_(False)"
        )


def _kind(param: nn.Parameter, dtype: torch.dtype) -> str:
    return str(dtype) if param.requires_grad else f"{dtype} {FROZEN}"
