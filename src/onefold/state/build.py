"""Moves a model's parameters into the flat buffers of its units, one unit at a time.

So there are never two copies of the model in memory. A model on the meta device is filled on the way.
"""

from __future__ import annotations

from torch import nn

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comms
from onefold.cost.states import updated_numel
from onefold.model.dtensor_shards import held, put
from onefold.model.meta import Builder
from onefold.model.resolved import Resolved
from onefold.offload.host_memory import give_back
from onefold.offload.tiers import Tiers
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier
from onefold.state.rounding import narrowed
from onefold.state.unit import Unit

LARGE_BYTES = 1 << 20  # units below leave no holes worth closing


def build_units(model: nn.Module, resolved: Resolved, comms: Comms, pool: Pool, tiers: Tiers) -> list[Unit]:
    """The units that have flat buffers, in registration order. Frozen parameters that stay replicated are cast to what
    they compute in, where they are."""
    settings, precision = resolved.settings, resolved.precision
    builder = Builder(model, resolved.device, settings.init, settings.seed) if resolved.meta else None
    params, units = dict(model.named_parameters()), []
    _reserve(resolved, comms.shard.rank, tiers)
    for spec in resolved.units:
        members = [params.pop(slot.name) for slot in spec.layout.slots]
        if builder:
            builder.build(members)
        if spec.flat:
            dtypes = precision.dtypes(spec.dtype)
            units.append(
                Unit(
                    spec.layout, members, spec.placement, comms.shard, comms.replica, pool, dtypes, tiers,
                    trained=spec.trained,
                )
            )  # fmt: skip
        else:
            for param in members:
                if param.dtype is not spec.dtype:
                    put(param, narrowed(held(param).detach(), spec.dtype))
        del members
        if resolved.device.type == "cpu" and spec.layout.numel * spec.layout.itemsize >= LARGE_BYTES:
            give_back()
    if builder:
        builder.finish()
    return units


def _reserve(resolved: Resolved, rank: int, tiers: Tiers) -> None:
    """Raises unless there is room for what shard() itself puts on the host or on disk. The optimizer's state comes
    later."""
    needed = dict.fromkeys(Tier, 0)
    for spec in resolved.units:
        size = spec.size(rank, resolved.precision)
        needed[spec.placement.optimizer_tier] += updated_numel(size, spec.placement) * size.widths.master
        needed[spec.placement.parameters_tier] += size.shard * size.widths.compute
    path = Offload.of(resolved.settings.offload).path
    tiers.reserve("offload", host_bytes=needed[Tier.HOST], disk_bytes=needed[Tier.DISK], path=path)
