"""Offload(optimizer="auto"): which splits of units over device, host and disk are possible, and which is fastest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from onefold.cost.automatic import host_need, told_of
from onefold.cost.filling import Room, Taken, with_blocks
from onefold.cost.machine import here
from onefold.cost.splits import Overlap, SplitCost, UnitSeconds, fastest, seconds_of, split_s, tiers_of
from onefold.cost.states import parameter_bytes
from onefold.cost.text import format_bytes
from onefold.errors import OffloadError, PlacementWarning
from onefold.model.storage import storage_bytes
from onefold.optim.disk_room import DiskRoom
from onefold.optim.fullest_rank import FullestRank
from onefold.optim.raising import blocks_of, blocks_to_keep
from onefold.optim.step_needs import StepNeeds
from onefold.runtime.automatic import host_bytes_of
from onefold.runtime.engine import Engine
from onefold.runtime.held_tensors import host_tensors
from onefold.settings.offload import Offload
from onefold.settings.placement import Scope, Tier


class Planned(NamedTuple):
    """What splits of units over tiers are compared by; all ranks have the same."""

    units: list[UnitSeconds]
    overlap: Overlap
    host_bytes: int  # of host memory, that each rank may take
    files: list[int]  # bytes of each unit's state if it is on disk; empty without a disk
    disk_bytes: int  # of the disk, that each rank may take
    forward_s: float  # of a micro-batch


class PossibleSplits:
    """Of the units of one model, by what a step `needs`."""

    def __init__(
        self, engine: Engine, needs: StepNeeds, agreed: FullestRank, disk: DiskRoom, *, in_backward: bool
    ) -> None:
        self._engine, self._needs, self._agreed, self._disk = engine, needs, agreed, disk
        self._in_backward = in_backward
        self._told = False  # that the host has too little room

    def fastest(self, planned: Planned, room: Room, most_bytes: int, candidates: Collection[int]) -> list[Tier]:
        """The tier of each unit's state: of the splits with which a step takes no more than `most_bytes` on any device
        and that the host, or else the disk, holds, the one with the fewest planned seconds, as far as they are looked
        at. Collective; all ranks get the same, the best of what they have chosen that fits on all."""

        def fits(chosen: frozenset[int]) -> bool:
            return room.needed_bytes(chosen) <= most_bytes

        chosen = self._agreed.all_of(on_tier(self.split(planned, candidates, fits), Tier.DEVICE))
        common = frozenset.intersection(*chosen)  # fits on every rank, since fewer units fit where more do
        picks = sorted({*chosen} - {common}, key=sorted)
        fit = frozenset.intersection(*self._agreed.all_of([at for at, pick in enumerate(picks) if fits(pick)]))
        splits = [self.split(planned, pick, lambda chosen: True) for pick in (common, *(picks[at] for at in fit))]
        return min(splits, key=lambda tiers: self._cost(planned, tiers))

    def _cost(self, planned: Planned, tiers: Sequence[Tier]) -> SplitCost:
        if self._disk.used:
            on_disk = sum(nbytes for nbytes, tier in zip(planned.files, tiers, strict=True) if tier is Tier.DISK)
            lacking = max(on_disk - planned.disk_bytes, 0)
        else:
            lacking = self._host_lacks(planned, tiers)
        return SplitCost(lacking, split_s(planned.units, tiers, planned.overlap))

    def _host_lacks(self, planned: Planned, tiers: Sequence[Tier]) -> int:
        need = host_need(*self._needs.rows(), tiers, cost=self._needs.cost, in_backward=self._in_backward)
        return max(need - planned.host_bytes, 0)

    def planned_seconds(self) -> Planned:
        """The planner's seconds of each unit, with a forward as long as on the slowest rank. Collective."""
        sizes, placements = self._needs.rows()
        resolved, forward_s = self._engine.resolved, self._agreed.largest(self._engine.watch.forward_s)
        again = resolved.settings.activations != "keep"  # each block runs its forward again
        trained = [(size.numel, size.trained) for size in sizes]
        share = sum(numel for numel, one in trained if one) / (sum(numel for numel, _ in trained) or 1)
        backward_s = (1 + share + again) * forward_s  # gradients of activations, and of the weights that are trained
        seconds = seconds_of(
            sizes, placements, self._needs.cost, here(resolved.device), ranks=_local_ranks(),
            forward_s=forward_s, backward_s=backward_s,
        )  # fmt: skip
        cuda = resolved.device.type == "cuda"  # on a CPU both are the same cores
        hidden = all(placement.parameters is Scope.SHARDED for placement in placements)
        overlap = Overlap(cuda and self._in_backward, cuda and hidden)
        used = self._disk.used
        files = self._agreed.largest_of_each(self._disk.file_bytes()) if used else []
        disk_bytes = self._agreed.smallest(self._disk.room_bytes) if used else 0
        return Planned(seconds, overlap, self.host_room(), files, disk_bytes, forward_s)

    def split(
        self, planned: Planned, candidates: Collection[int], fits_device: Callable[[frozenset[int]], bool]
    ) -> list[Tier]:
        """The fastest split of those that fit the device, the host and, where one is used, the disk. If none is found
        that fits them all, the one that comes nearest. For this rank's device."""
        count, on_disk = len(self._engine.units), self._disk.used
        return fastest(
            planned.units, planned.overlap, candidates=candidates, fits_device=fits_device,
            fits_host=lambda *chosen: not (on_disk and self._host_lacks(planned, tiers_of(count, *chosen))),
            lacking=lambda tiers: self._cost(planned, tiers).lacking_bytes,
        )  # fmt: skip

    def checked(self, tiers: Sequence[Tier], host_bytes: int) -> str:
        """Raises if the host has no room for what is not on the device, and there is no disk; warns if it has none for
        what cannot be on disk. Else what the placement's reason says of units on disk."""
        cost, backward, rows = self._needs.cost, self._in_backward, self._needs.rows()
        needed = host_need(*rows, tiers, cost=cost, in_backward=backward)
        waiting = needed - host_need(*rows, tiers, cost=cost, in_backward=True)
        if needed > host_bytes and not self._disk.used:
            smaller = "'8bit'" if cost.small else "'bf16' or '8bit'"
            helps = [
                *(["Offload(path=…) for what does not fit"] if not cost.small else []),
                *self._without_waiting(waiting),
                *([f"smaller state (Optimizer(state={smaller}))"] if cost.one_pass and not cost.per_block else []),
                "shorter micro-batches",
                "activations='checkpoint'",
            ]
            raise OffloadError(
                f"the optimizer state of {tiers.count(Tier.HOST)} of {len(tiers)} units does not fit on the device and "
                f"needs {format_bytes(needed)} of host memory, but each rank can have {format_bytes(host_bytes)}; any "
                f"of these helps: {'; '.join(helps)}"
            )
        if needed > host_bytes and not self._told and self._engine.comms.world.rank == 0:
            self._told = True
            helps = [*self._without_waiting(waiting), "smaller units (bucket_bytes=)", "a larger host_bytes"]
            warnings.warn(
                f"with all optimizer state on disk that the device has no room for, a step may take "
                f"{format_bytes(needed)} of host memory, and each rank can have {format_bytes(host_bytes)}; any of "
                f"these helps: {'; '.join(helps)}",
                PlacementWarning, stacklevel=6,
            )  # fmt: skip
        return told_of(*rows, tiers, host_bytes, cost=cost, in_backward=backward)

    def _without_waiting(self, waiting_bytes: int) -> list[str]:
        """That gradients need not wait for step() in host memory, if that helps and can be."""
        half = self._engine.resolved.precision.compute is torch.float16
        if not waiting_bytes or half or self._engine.comms.pp.size > 1:
            return []
        return [
            f"step_in_backward=True, which neither clips nor accumulates gradients and lets none wait in host memory "
            f"({format_bytes(waiting_bytes)} of this)"
        ]

    def keep_blocks(self, planned: Planned, parts: list[Taken], most_bytes: int) -> list[Taken]:
        """Where activations="auto" left blocks to this step: lets as many of them keep their activations as make the
        step fastest. Returns the parts of the step with those bytes added. Collective."""
        engine, choice = self._engine, self._engine.block_choice
        if choice is None:
            return parts
        blocks, micro_batches = blocks_of(engine, choice), engine.watch.forwards
        again_s = planned.forward_s / max(1, len(engine.resolved.blocks))
        may_stay, units = self._needs.may_stay(), self._needs.units(first=True)

        def split(parts: list[Taken]) -> list[Tier]:
            room = Room(parts, units)
            return self.split(planned, may_stay, lambda chosen: room.needed_bytes(chosen) <= most_bytes)

        def fits(parts: list[Taken]) -> bool:
            if Room(parts, units).needed_bytes(()) > most_bytes:
                return False
            return self._disk.used or not self._host_lacks(planned, split(parts))

        def kept(count: int) -> list[Taken]:
            return with_blocks(parts, blocks[len(blocks) - count :], choice.more_bytes)

        def seconds(parts: list[Taken], count: int) -> float:
            return split_s(planned.units, split(parts), planned.overlap) - micro_batches * count * again_s

        count = self._agreed.smallest(blocks_to_keep(blocks, choice.more_bytes, parts, fits, seconds))
        while count and not self._disk.used and engine.comms.world.size > 1:  # what fits each rank may not fit all
            agreed = self.fastest(planned, Room(kept(count), units), most_bytes, may_stay)
            if not self._host_lacks(planned, agreed):
                break
            count //= 2
        choice.keep_last(count)
        others = f"; the others keep their activations, {format_bytes(count * choice.more_bytes)}" if count else ""
        engine.tell_activations(f"{len(blocks) - count} of {len(blocks)} blocks are computed again{others}")
        return kept(count)

    def remedies(self) -> str:
        """What helps if a step does not fit with no optimizer state on the device."""
        settings, (sizes, placements) = self._engine.resolved.settings, self._needs.rows()
        there = [row.parameters_tier is Tier.DEVICE for row in placements]
        nbytes = sum(parameter_bytes(size, row) * one for size, row, one in zip(sizes, placements, there, strict=True))
        stage = "" if settings.stage == 3 else "stage=3 and "
        offload_parameters = (
            f"keep parameters, which take {format_bytes(nbytes)} of this, in host memory ({stage}"
            f"Offload(optimizer='auto', parameters='host')), or "
        )
        movable = any(there) and Offload.of(settings.offload).parameters is None
        return (
            f"to fit, {offload_parameters if movable else ''}use shorter micro-batches, activations='checkpoint', "
            f"tiled losses, smaller units (bucket_bytes=) or more ranks"
        )

    def host_room(self) -> int:
        """Bytes of host memory that each rank may have, with those that it has. Collective."""
        held = sum(storage_bytes(tensors) for tensors in host_tensors(self._engine).values())
        return self._agreed.smallest(host_bytes_of(self._engine.resolved.settings, held))


def on_tier(tiers: Sequence[Tier], tier: Tier) -> list[int]:
    """The units, by number, whose state is on this tier."""
    return [number for number, one in enumerate(tiers) if one is tier]


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
