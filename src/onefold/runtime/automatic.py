"""Decides what the settings of shard() leave to the memory there is, alike on all ranks: by the smallest device."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Mapping, Sequence

import torch

from onefold.comm.agreement import digest, on_all
from onefold.comm.communicator import Comms
from onefold.comm.meter import Label
from onefold.comm.strategy import Strategy
from onefold.cost.automatic import ADAM, choose_stage, choose_tiers, room_for_activations
from onefold.cost.case import Choice
from onefold.cost.filling import FILLED
from onefold.cost.machine import device_budget, here
from onefold.cost.parameters import choose_parameters, least_need, parameter_need, parameters_in_first_step
from onefold.cost.search import STATES_SHARE
from onefold.cost.states import StateCost
from onefold.cost.text import format_bytes
from onefold.errors import ConfigError
from onefold.model.dtensor_shards import TensorShards
from onefold.model.resolved import Resolved
from onefold.model.survey import Survey
from onefold.model.unit_spec import AS_SET, UnitSpec, frozen_kinds, place, place_all, widths_by_kind
from onefold.offload.files import disk_share
from onefold.offload.host_memory import host_share
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier
from onefold.settings.precision import Precision
from onefold.settings.zero import AUTO, Zero

LOG = logging.getLogger("onefold")
UNDECIDED = (
    'Offload(optimizer="auto") decides in the first step, which shows what activations take: at most {} of {} units '
    "can keep their optimizer state on the device"
)
SHARE_OF_WHOLE_GPU = 0.3  # one rank, without `device_bytes`: parameters that take no more stay there, see below
OFF_DEVICE = {Tier.HOST: "in host memory", Tier.DISK: "on disk"}


def resolve(
    found: Survey,
    tensor_shards: TensorShards,
    device: torch.device,
    comms: Comms,
    given_tiers: Mapping[str, Tier] | None = None,
) -> Resolved:
    """What shard() will build, with stage="auto" and Offload(optimizer="auto") decided; `given_tiers` are the
    tiers of parameters by the names of units, if they are known. Collective where there is something to decide."""
    ranks, replicas, settings, units = comms.shard.size, comms.replica.size, found.settings, found.units
    precision = Precision.of(settings.precision).decided(
        own_sum=comms.shard.strategy.own_sum, cuda=not comms.shard.on_host
    )
    reasons, why, why_parameters, candidates = list[str](), "", "", frozenset[int]()
    parameter_tiers, device_ranks = dict(given_tiers or {}), _device_ranks(settings, device, comms)
    if settings.stage == AUTO:
        stage, because = _automatic_stage(found, precision, device, comms)
        settings = dataclasses.replace(settings, stage=stage)
        units = _placed(units, settings)
        reasons.append(f"stage {stage}: {because}")
    if given_tiers is None and parameters_are_automatic(settings, device, comms):
        parameter_tiers, why_parameters = automatic_parameters(units, settings, precision, device, comms, device_ranks)
    if parameter_tiers:
        units = _placed(units, settings, parameter_tiers=parameter_tiers)
    if Offload.of(settings.offload).optimizer == AUTO:
        waits = waits_for_a_step(settings, device, comms)
        tiers, why = automatic_tiers(units, settings, precision, device, comms, share=FILLED if waits else None)
        if waits:
            chosen = settings
            on_all(comms.world, lambda: _check_budget(units, chosen, precision, device, device_ranks))
            raised = automatic_tiers(
                _placed(units, settings), settings, precision, device, comms, share=FILLED
            )[0] if parameter_tiers else tiers  # fmt: skip
            candidates = frozenset(index for index, tier in enumerate(raised.values()) if tier is Tier.DEVICE)
            tiers = {name: Tier.HOST if tier is Tier.DEVICE else tier for name, tier in tiers.items()}
            why = UNDECIDED.format(len(candidates), len(tiers))
        units = _placed(units, settings, tiers, parameter_tiers)
        if comms.world.rank == 0:
            LOG.info("%s", "; ".join([*reasons, *[why_parameters] * bool(why_parameters), why]))
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
        why=why,
        why_at_shard="; ".join(reasons),
        why_parameters=why_parameters,
        device_ranks=device_ranks,
        candidates=candidates,
    )


def waits_for_a_step(settings: Zero, device: torch.device, comms: Comms) -> bool:
    """Whether the first step can say how much memory activations take: on a GPU, and on a CPU with a budget that
    stands for a device's memory; not in a simulation."""
    offload = Offload.of(settings.offload)
    known = device.type == "cuda" or offload.device_bytes is not None
    return offload.optimizer == AUTO and known and not comms.shard.simulated


def parameters_are_automatic(settings: Zero, device: torch.device, comms: Comms) -> bool:
    """Whether Offload(optimizer="auto") says where parameters are: at stage 3, unless users have said it, and where the
    memory of the device is known. A simulation knows it if it has a budget."""
    offload = Offload.of(settings.offload)
    known = waits_for_a_step(settings, device, comms) or offload.device_bytes is not None
    return offload.optimizer == AUTO and offload.parameters is None and settings.stage == 3 and known


def _device_ranks(settings: Zero, device: torch.device, comms: Comms) -> int:
    """How many ranks share this rank's GPU, where its memory is divided among them. Collective then."""
    if device.type != "cuda" or not waits_for_a_step(settings, device, comms):
        return 1
    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}".encode()
    return comms.world.exchange(mine, Label("agree", "GPUs")).count(mine)


def automatic_parameters(
    units: Sequence[UnitSpec],
    settings: Zero,
    precision: Precision,
    device: torch.device,
    comms: Comms,
    device_ranks: int,
) -> tuple[dict[str, Tier], str]:
    """The tier of each unit's parameters, by name, and the reason; empty if all stay on the device. Decided by the
    smallest budget of any rank. As many as the host has room for begin there, and all of them if a disk has room for
    the rest: the first step shows what activations take, and then those that fit come to the device. One rank would
    keep its shard beside the unsharded unit for good then, so without a budget they stay on a GPU of which they take a
    small share. In a simulation, which has no such step, they may take all of a budget. Collective."""
    offload, machine, simulated = Offload.of(settings.offload), here(device), comms.shard.simulated
    mine = offload.device_bytes if simulated else None  # the budget of a simulation is not of the device that is here
    disk = 0 if simulated or offload.path is None else disk_share(offload.path)
    budget, host_bytes, disk_bytes = _smallest(
        comms,
        mine or device_budget(device, offload.device_bytes, device_ranks),
        offload.host_bytes or host_share(),
        disk,
    )
    whole_gpu = comms.shard.size == 1 and offload.device_bytes is None
    share = 1.0 if simulated else SHARE_OF_WHOLE_GPU if whole_gpu else 0.0
    sizes = [unit.size(0, precision) for unit in units]  # as rank 0 has them, which owns the most
    rows = {
        tier: [place(u.layout, settings, parameter_tiers={u.layout.name: tier}) for u in units]
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
    }
    strategy, cuda, prefetch = comms.shard.strategy, machine.device == "cuda", prefetch_units(settings)
    wanted = parameter_need(sizes, rows[Tier.DEVICE], strategy, cuda=cuda, prefetch=prefetch).total
    if wanted <= share * budget:
        return {}, ""
    spills = offload.path is not None

    def chosen(device_bytes: int) -> list[Tier]:
        return choose_parameters(
            sizes, rows, strategy, cuda=cuda, prefetch=prefetch, device_bytes=device_bytes,
            host_bytes=host_bytes if spills else None,
        )  # fmt: skip

    tiers = chosen(budget if simulated else 0 if spills else int(STATES_SHARE * budget))
    masters = sum(size.shard * size.widths.master for size in sizes if size.trained)
    on_disk = sum(
        size.shard * size.widths.compute for size, tier in zip(sizes, tiers, strict=True) if tier is Tier.DISK
    )
    off_device = spills and masters + on_disk <= disk_bytes
    if spills and not (simulated or off_device):
        tiers = chosen(int(STATES_SHARE * budget))
    if not (simulated or off_device):
        tiers = parameters_in_first_step(sizes, rows, tiers, host_bytes)
    found = "device_bytes" if offload.device_bytes is not None else "the device"
    waits = "" if simulated else "; the first step shows how many fit"
    limit = f"more than {share:.0%} of {found}, {format_bytes(int(share * budget))}" if share else f"of {found}"
    why = (
        f"{parameters_told(tiers)}: all of them, with unsharded units and buffers, would take {format_bytes(wanted)}, "
        f"{limit}{waits}"
    )
    return {unit.layout.name: tier for unit, tier in zip(units, tiers, strict=True)}, why


def parameters_told(tiers: Sequence[Tier]) -> str:
    """How many units keep their parameters on the device, and where the others do."""
    there = [f"{tiers.count(tier)} {text}" for tier, text in OFF_DEVICE.items() if tier in tiers]
    where = f" ({', '.join(there)})" if there else ""
    return f"parameters of {tiers.count(Tier.DEVICE)} of {len(tiers)} units stay on the device{where}"


def prefetch_units(settings: Zero) -> int:
    """Units that are prefetched; 1 where the schedule chooses."""
    return settings.prefetch if isinstance(settings.prefetch, int) else 1


def _smallest(comms: Comms, *mine: int) -> list[int]:
    """The smallest of each of these numbers on any rank. Collective."""
    rows = comms.world.exchange(" ".join(map(str, mine)).encode(), Label("agree", "memory"))
    return [min(map(int, column)) for column in zip(*(row.split() for row in rows), strict=True)]


def _placed(
    units: Sequence[UnitSpec],
    settings: Zero,
    tiers: Mapping[str, Tier] = AS_SET,
    parameter_tiers: Mapping[str, Tier] = AS_SET,
) -> tuple[UnitSpec, ...]:
    return tuple(
        dataclasses.replace(unit, placement=place(unit.layout, settings, tiers, parameter_tiers)) for unit in units
    )


def _check_budget(
    units: Sequence[UnitSpec], settings: Zero, precision: Precision, device: torch.device, device_ranks: int
) -> None:
    """Raises if the budget is below the least that a step needs: the parameters that stay on the device, and one
    unsharded unit."""
    asked = Offload.of(settings.offload).device_bytes
    budget = device_budget(device, asked, device_ranks)
    need = least_need([unit.size(0, precision) for unit in units], [unit.placement for unit in units])
    if need.total <= budget:
        return
    found = f"Offload(device_bytes={asked})" if asked is not None else f"the device's {format_bytes(budget)}"
    more = f"give at least {need.total} bytes and room for activations" if asked is not None else "use a larger device"
    kept, unsharded = format_bytes(need.kept), format_bytes(need.unsharded)
    if settings.stage == 3:
        raise ConfigError(
            f"{found} is too small even with all sharded parameters and all optimizer state off the device: the "
            f"largest unsharded unit takes {unsharded}, and replicated parameters take {kept}; {more}, make units "
            f"smaller (bucket_bytes=, units=), or set keep_whole=0"
        )
    raise ConfigError(
        f"{found} is less than the parameters of this model, {kept}, which are replicated on every rank at "
        f"stage={settings.stage}; use stage=3, where 'auto' moves parameters that do not fit on the device to host "
        f"memory or to disk, or {more}"
    )


def _automatic_stage(found: Survey, precision: Precision, device: torch.device, comms: Comms) -> tuple[int, str]:
    """stage="auto": the first stage whose states leave room on the smallest device, and the reason."""
    settings, machine = found.settings, here(device)
    (smallest,) = _smallest(comms, Offload.of(settings.offload).device_bytes or machine.memory_bytes)
    stage, why = choose_stage(
        found.params,
        widths_by_kind(found.units, precision),
        frozen_kinds(found.units),
        strategy=comms.shard.strategy,
        replicas=comms.replica.size,
        bucket_bytes=settings.bucket_bytes,
        shared_bytes=settings.shared_bytes,
        machine=dataclasses.replace(machine, memory_bytes=smallest),
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
    offload, machine = Offload.of(settings.offload), here(device)
    smallest, host_bytes = _smallest(
        comms, offload.device_bytes or machine.memory_bytes, offload.host_bytes or host_share()
    )
    chosen = choose_tiers(
        [unit.size(0, precision) for unit in units],  # as rank 0 has them, which owns the most
        [unit.placement for unit in units],
        strategy=comms.shard.strategy,
        machine=dataclasses.replace(machine, memory_bytes=smallest),
        prefetch=prefetch_units(settings),
        device_bytes=int(share * smallest) if share else None if offload.device_bytes is None else smallest,
        host_bytes=None if offload.path is None or cost.small else host_bytes,
        cost=cost,
    )
    names = [unit.layout.name for unit in units if unit.trained]
    return dict(zip(names, chosen.tiers, strict=True)), chosen.why


def host_bytes_of(settings: Zero, held: int) -> int:
    """Bytes of host memory that states of this rank may take, which has `held` bytes there now."""
    return Offload.of(settings.offload).host_bytes or host_share() + held


def choice_of(resolved: Resolved) -> Choice:
    """What a plan calls the settings of this model."""
    settings, offload = resolved.settings, Offload.of(resolved.settings.offload)
    assert isinstance(settings.stage, int)
    device_units = sum(unit.trained and unit.placement.optimizer_tier is Tier.DEVICE for unit in resolved.units)
    return Choice(
        settings.stage,
        optimizer=offload.optimizer_tier.value,
        parameters=offload.parameters_tier.value,
        device_units=device_units if offload.optimizer == AUTO else 0,
        activations=settings.activations,
    )


def room_left(
    resolved: Resolved,
    strategy: Strategy,
    *,
    cost: StateCost | None,
    accumulates: bool = False,
    in_backward: bool = False,
) -> int:
    """Bytes that states leave on this device, where gradients are summed so. Optimizer state costs `cost`; None: there
    is no Optimizer yet, and Adam's is counted."""
    settings, units, choice = resolved.settings, resolved.units, choice_of(resolved)
    offload, cost = Offload.of(settings.offload), ADAM if cost is None else cost
    machine = here(resolved.device)
    room = room_for_activations(
        resolved.params, widths_by_kind(units, resolved.precision), frozen_kinds(units), choice,
        strategy=strategy, replicas=resolved.replicas, bucket_bytes=settings.bucket_bytes,
        shared_bytes=settings.shared_bytes, machine=machine, cost=cost, accumulates=accumulates,
        in_backward=in_backward,
    )  # fmt: skip
    moved = [unit for unit in units if unit.placement.parameters_tier is not offload.parameters_tier]
    elsewhere = sum(unit.layout.shard_numel * unit.dtype.itemsize for unit in moved)
    usable = machine.usable_bytes if offload.device_bytes is None else min(machine.usable_bytes, offload.device_bytes)
    return max(0, room + elsewhere - (machine.usable_bytes - usable))
