"""What the settings of shard() leave to the memory there is: decided alike on all ranks, by the smallest device."""

from __future__ import annotations

import dataclasses
import logging

import torch

from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axes
from onefold.comm.meter import Label
from onefold.cost.automatic import choose_stage, choose_tiers, room_for_activations
from onefold.cost.estimate import Choice
from onefold.cost.machine import here
from onefold.cost.sizes import of_layout
from onefold.model.survey import FROZEN, Survey, place
from onefold.offload.host_memory import host_share
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier
from onefold.settings.precision import Precision
from onefold.settings.widths import Widths
from onefold.settings.zero import Zero

LOG = logging.getLogger("onefold")


def automatic_stage(
    settings: Zero, found: Survey, policy: Precision, device: torch.device, world: Comm, axes: Axes
) -> tuple[Zero, str]:
    """stage="auto": by the smallest device of all ranks, so that all decide alike."""
    machine = here(device)
    memories = world.exchange(str(machine.memory_bytes).encode(), Label("agree", "memory"))
    kinds, frozen = _kinds(found, policy)
    stage, why = choose_stage(
        found.infos,
        kinds,
        frozen,
        ranks=axes.shard.size,
        replicas=axes.replica.size,
        bucket_bytes=settings.bucket_bytes,
        machine=dataclasses.replace(machine, memory_bytes=min(int(row) for row in memories)),
        optimizer=Offload.of(settings.offload).optimizer,
    )
    if world.rank == 0:
        LOG.info('stage="auto" chose stage %d: %s', stage, why)
    return dataclasses.replace(settings, stage=stage), f"stage {stage}: {why}"


def automatic_tiers(
    settings: Zero, found: Survey, policy: Precision, device: torch.device, world: Comm, axes: Axes
) -> tuple[dict[str, Tier], str]:
    """Offload(optimizer="auto"): where the optimizer state of each unit is, by the smallest budgets of all ranks."""
    offload, machine = Offload.of(settings.offload), here(device)
    mine = f"{offload.device_bytes or machine.memory_bytes} {offload.host_bytes or host_share()}"
    rows = [row.split() for row in world.exchange(mine.encode(), Label("agree", "memory"))]
    smallest, host_bytes = (min(map(int, column)) for column in zip(*rows, strict=True))
    blocks, sizes = {info.name: info.block for info in found.infos}, []
    for layout in found.layouts:
        first, trained = layout.slots[0].name, not layout.kind.endswith(FROZEN)
        widths = policy.dtypes(found.dtypes[first]).widths  # as rank 0 has it, which owns the most
        sizes.append(of_layout(layout, 0, widths, block=blocks[first], trained=trained))
    chosen = choose_tiers(
        sizes,
        [place(layout, settings, axes.shard.size) for layout in found.layouts],
        ranks=axes.shard.size,
        machine=dataclasses.replace(machine, memory_bytes=smallest),
        prefetch=settings.prefetch if isinstance(settings.prefetch, int) else 1,
        device_bytes=None if offload.device_bytes is None else smallest,
        host_bytes=None if offload.path is None else host_bytes,
    )
    if world.rank == 0:
        LOG.info("%s", chosen.why)
    names = [unit.name for unit in sizes if unit.trained]
    return dict(zip(names, chosen.tiers, strict=True)), chosen.why


def room_left(settings: Zero, found: Survey, policy: Precision, device: torch.device, axes: Axes, staying: int) -> int:
    """Bytes that states leave on this device."""
    kinds, frozen = _kinds(found, policy)
    offload = Offload.of(settings.offload)
    assert isinstance(settings.stage, int)
    choice = Choice(
        settings.stage,
        optimizer=offload.optimizer_tier.value,
        parameters=offload.parameters_tier.value,
        staying=staying,
    )
    return room_for_activations(
        found.infos, kinds, frozen, choice, ranks=axes.shard.size, replicas=axes.replica.size,
        bucket_bytes=settings.bucket_bytes, machine=here(device),
    )  # fmt: skip


def _kinds(found: Survey, policy: Precision) -> tuple[dict[str, Widths], frozenset[str]]:
    """Bytes per element of each kind of parameter, and the kinds that are not trained."""
    kinds = {info.kind: policy.dtypes(found.dtypes[info.name]).widths for info in found.infos}
    return kinds, frozenset(kind for kind in kinds if kind.endswith(FROZEN))
