"""Moves a model's parameters into the flat buffers of its units, one unit at a time.

So there are never two copies of the model in memory. A model on the meta device is filled on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comms
from onefold.cost.layout import Span
from onefold.cost.states import updated_numel
from onefold.model.dtensor_shards import local_tensor, set_local_tensor
from onefold.model.meta import Builder
from onefold.model.resolved import Resolved
from onefold.model.unit_spec import UnitSpec
from onefold.offload.host_memory import trim_heap
from onefold.offload.tiers import Tiers
from onefold.settings.offload import Offload
from onefold.settings.placement import Scope, Tier
from onefold.settings.precision import Precision
from onefold.state.rounding import narrowed
from onefold.state.unit import Unit

LARGE_BYTES = 1 << 20  # units below leave no holes worth closing


def reserve(resolved: Resolved, rank: int, tiers: Tiers) -> None:
    """Raises unless there is room for what shard() itself puts on the host or on disk. The optimizer's state comes
    later. The room is for all ranks of this machine together: each has to look before any of them takes its part."""
    needed = dict.fromkeys(Tier, 0)
    for spec in resolved.units:
        size = spec.size(rank, resolved.precision)
        needed[spec.placement.optimizer_tier] += updated_numel(size, spec.placement) * size.widths.master
        needed[spec.placement.parameters_tier] += size.shard * size.widths.compute
    path = Offload.of(resolved.settings.offload).path
    tiers.reserve("offload", host_bytes=needed[Tier.HOST], disk_bytes=needed[Tier.DISK], path=path)


def build_units(model: nn.Module, resolved: Resolved, comms: Comms, pool: Pool, tiers: Tiers) -> list[Unit]:
    """The units that have flat buffers, in registration order. Frozen parameters that stay replicated are cast to what
    they compute in, where they are."""
    settings, precision = resolved.settings, resolved.precision
    builder = None
    if resolved.meta:
        builder = Builder(model, resolved.device, settings.init, settings.seed, _kept(resolved, comms.shard.rank))
    params, units, sharded = dict(model.named_parameters()), [], resolved.sharded_names
    for spec in resolved.units:
        members = [params.pop(slot.name) for slot in spec.layout.slots]
        for slot, param in zip(spec.layout.slots, members, strict=True):
            if slot.name in sharded and not param.is_meta and param.device != resolved.device:
                param.data = param.data.to(resolved.device)  # not before: the device need not have room for all
        if builder:
            builder.build(members)
        if spec.flat:
            units.append(build_unit(spec, members, precision, comms, pool, tiers))
        else:
            for param in members:
                if param.dtype is not spec.dtype:
                    set_local_tensor(param, narrowed(local_tensor(param).detach(), spec.dtype))
        del members
        if resolved.device.type == "cpu" and spec.layout.numel * spec.layout.itemsize >= LARGE_BYTES:
            trim_heap()
    if builder:
        builder.finish()
    return units


def build_unit(
    spec: UnitSpec, params: Sequence[nn.Parameter], precision: Precision, comms: Comms, pool: Pool, tiers: Tiers
) -> Unit:
    """Moves these parameters into the flat buffer of a unit."""
    dtypes = precision.dtypes(spec.dtype)
    return Unit(
        spec.layout, params, spec.placement, comms.shard, comms.replica, pool, dtypes, tiers, trained=spec.trained
    )


def _kept(resolved: Resolved, rank: int) -> dict[str, Span]:
    """The elements that `rank` keeps of each parameter that is sharded; a DTensor is split before it is sharded."""
    sharded = [spec.layout for spec in resolved.units if spec.placement.parameters is Scope.SHARDED]
    kept = {slot.name: Span(0, 0) for layout in sharded for slot in layout.slots}
    kept |= {piece.name: piece.elements for layout in sharded for piece in layout.pieces(rank)}
    return {name: span for name, span in kept.items() if name not in resolved.tensor_shards}
