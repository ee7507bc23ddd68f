"""Decides what the settings of shard() leave to the memory there is, alike on all ranks: by the smallest device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from onefold.comm.agreement import digest, on_all
from onefold.comm.communicator import Comms
from onefold.comm.meter import Label
from onefold.comm.strategy import Strategy
from onefold.cost.automatic import ADAM, choose_stage, choose_tiers, room_for_activations
from onefold.cost.case import Choice
from onefold.cost.filling import FILLED
from onefold.cost.machine import here
from onefold.cost.states import StateCost, parameter_bytes
from onefold.cost.text import format_bytes
from onefold.errors import ConfigError
from onefold.model.dtensor_shards import TensorShards
from onefold.model.resolved import Resolved
from onefold.model.survey import Survey
from onefold.model.unit_spec import UnitSpec, frozen_kinds, place, place_all, widths_by_kind
from onefold.offload.host_memory import host_share
from onefold.settings.offload import Offload
from onefold.settings.placement import Scope, Tier
from onefold.settings.precision import Precision
from onefold.settings.zero import AUTO, Zero

LOG = logging.getLogger("onefold")
UNDECIDED = (
    'Offload(optimizer="auto") decides in the first step, which shows what activations take: at most {} of {} units '
    "can keep their optimizer state on the device"
)


def resolve(found: Survey, tensor_shards: TensorShards, device: torch.device, comms: Comms) -> Resolved:
    """What shard() will build, with stage="auto" and Offload(optimizer="auto") decided. Collective where there is
    something to decide."""
    ranks, replicas, settings, units = comms.shard.size, comms.replica.size, found.settings, found.units
    precision = Precision.of(settings.precision).decided(
        own_sum=comms.shard.strategy.own_sum, cuda=device.type == "cuda"
    )
    reasons, candidates = [], frozenset[int]()
    if settings.stage == AUTO:
        stage, why = _automatic_stage(found, precision, device, comms)
        settings = dataclasses.replace(settings, stage=stage)
        units = tuple(dataclasses.replace(unit, placement=place(unit.layout, settings)) for unit in units)
        reasons.append(f"stage {stage}: {why}")
    if Offload.of(settings.offload).optimizer == AUTO:
        waits = waits_for_a_step(settings, device, comms)
        tiers, why = automatic_tiers(units, settings, precision, device, comms, share=FILLED if waits else None)
        if waits:
            chosen = settings
            on_all(comms.world, lambda: _check_budget(units, chosen, precision, device))
            candidates = frozenset(index for index, tier in enumerate(tiers.values()) if tier is Tier.DEVICE)
            tiers = {name: Tier.HOST if tier is Tier.DEVICE else tier for name, tier in tiers.items()}
            why = UNDECIDED.format(len(candidates), len(tiers))
        units = tuple(dataclasses.replace(unit, placement=place(unit.layout, settings, tiers)) for unit in units)
        reasons.append(why)
        if comms.world.rank == 0:
            LOG.info("%s", why)
    return Resolved(
        settings=settings,
        precision=precision,
        device=device,
        ranks=ranks,
        replicas=replicas,
        meta=found.meta,
        params=found.params,
        units=units,
        placement=place_all(settings).over(ranks),
        blocks=found.blocks,
        kept_fp32=found.kept_fp32,
        tensor_shards=tensor_shards,
        dtypes=found.dtypes,
        digest=digest(found.lines),
        why="; ".join(reasons),
        candidates=candidates,
    )


def waits_for_a_step(settings: Zero, device: torch.device, comms: Comms) -> bool:
    """Whether the first step can say how much memory activations take: on a GPU, and on a CPU with a budget that
    stands for a device's memory; not in a simulation."""
    offload = Offload.of(settings.offload)
    known = device.type == "cuda" or offload.device_bytes is not None
    return offload.optimizer == AUTO and known and not comms.shard.simulated


def _check_budget(units: Sequence[UnitSpec], settings: Zero, precision: Precision, device: torch.device) -> None:
    """Raises if the device cannot hold this rank's parameters and the largest unsharded unit: "auto" moves optimizer
    state only, and parameters leave the device only if Offload(parameters=…) says so."""
    asked = Offload.of(settings.offload).device_bytes
    budget = here(device).memory_bytes if asked is None else asked
    sizes = [unit.size(0, precision) for unit in units]
    kept = sum(parameter_bytes(size, unit.placement) for size, unit in zip(sizes, units, strict=True))
    sharded = [unit.placement.parameters is Scope.SHARDED for unit in units]
    largest = max((size.unsharded_bytes * one for size, one in zip(sizes, sharded, strict=True)), default=0)
    if budget < kept + largest:
        found = f"Offload(device_bytes={asked})" if asked is not None else f"the device's {format_bytes(budget)}"
        more = f"give at least {kept + largest} bytes and room for activations, or use" if asked is not None else "use"
        stage = "" if settings.stage == 3 else "stage=3 and "
        raise ConfigError(
            f"{found} is less than the parameters that this rank keeps and the largest unit, {format_bytes(kept)} and "
            f"{format_bytes(largest)}, and 'auto' moves optimizer state only; {more} more ranks, or keep parameters "
            f"elsewhere: {stage}Offload(optimizer='host', parameters='host'), or 'disk' for either with path=…"
        )


def _automatic_stage(found: Survey, precision: Precision, device: torch.device, comms: Comms) -> tuple[int, str]:
    """stage="auto": the first stage whose states leave room on the smallest device, and the reason."""
    settings, machine = found.settings, here(device)
    memories = comms.world.exchange(str(machine.memory_bytes).encode(), Label("agree", "memory"))
    stage, why = choose_stage(
        found.params,
        widths_by_kind(found.units, precision),
        frozen_kinds(found.units),
        strategy=comms.shard.strategy,
        replicas=comms.replica.size,
        bucket_bytes=settings.bucket_bytes,
        shared_bytes=settings.shared_bytes,
        machine=dataclasses.replace(machine, memory_bytes=min(int(row) for row in memories)),
        optimizer=Offload.of(settings.offload).optimizer,
    )
    if comms.world.rank == 0:
        LOG.info('stage="auto" chose stage %d: %s', stage, why)
    return stage, why


def automatic_tiers(
    units: Sequence[UnitSpec],
    settings: Zero,
    precision: Precision,
    device: torch.device,
    comms: Comms,
    cost: StateCost = ADAM,
    *,
    share: float | None = None,
) -> tuple[dict[str, Tier], str]:
    """Offload(optimizer="auto"): by the names of trained units, where their optimizer state is, by the smallest budgets
    of all ranks; and the reason. What activations will need is not known: states may take this `share` of the budget.
    Without it a budget that users give is all for states. Collective."""
    offload, machine, world = Offload.of(settings.offload), here(device), comms.world
    mine = f"{offload.device_bytes or machine.memory_bytes} {offload.host_bytes or host_share()}"
    rows = [row.split() for row in world.exchange(mine.encode(), Label("agree", "memory"))]
    smallest, host_bytes = (min(map(int, column)) for column in zip(*rows, strict=True))
    chosen = choose_tiers(
        [unit.size(0, precision) for unit in units],  # as rank 0 has them, which owns the most
        [unit.placement for unit in units],
        strategy=comms.shard.strategy,
        machine=dataclasses.replace(machine, memory_bytes=smallest),
        prefetch=settings.prefetch if isinstance(settings.prefetch, int) else 1,
        device_bytes=int(share * smallest) if share else None if offload.device_bytes is None else smallest,
        host_bytes=None if offload.path is None or cost.small else host_bytes,
        cost=cost,
    )
    names = [unit.layout.name for unit in units if unit.trained]
    return dict(zip(names, chosen.tiers, strict=True)), chosen.why


def room_left(resolved: Resolved, strategy: Strategy) -> int:
    """Bytes that states leave on this device, where gradients are summed so."""
    settings, units = resolved.settings, resolved.units
    offload = Offload.of(settings.offload)
    assert isinstance(settings.stage, int)
    device_units = sum(unit.trained and unit.placement.optimizer_tier is Tier.DEVICE for unit in units)
    choice = Choice(
        settings.stage,
        optimizer=offload.optimizer_tier.value,
        parameters=offload.parameters_tier.value,
        device_units=device_units if offload.optimizer == AUTO else 0,
    )
    return room_for_activations(
        resolved.params, widths_by_kind(units, resolved.precision), frozen_kinds(units), choice,
        strategy=strategy, replicas=resolved.replicas, bucket_bytes=settings.bucket_bytes,
        shared_bytes=settings.shared_bytes, machine=here(resolved.device),
    )  # fmt: skip
