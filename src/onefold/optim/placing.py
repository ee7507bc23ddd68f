"""Offload(optimizer="auto"): where the optimizer state of each unit is, decided by the memory that a step took.

1 The first step runs with masters in host memory or on disk, and without any optimizer state. What it takes on the
  device is what parameters, activations and gradients on their way need.
2 When its gradients are complete, the first units of forward get their state on the device, as many as fit into 95% of
  it beside that; the next ones in host memory, and those that do not fit there on disk. Then the step updates them.
3 If a later step takes more (longer sequences, accumulation), the state of the last of these units leaves the device.

All ranks decide alike, by the fullest of them. On one kind of device, results do not depend on where state
is kept.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence

import torch

from onefold.comm.meter import Label
from onefold.cost.automatic import host_need, in_order, split_offloaded
from onefold.cost.filling import FILLED, Taken, UnitOnDevice, most_that_fit, needed_bytes
from onefold.cost.limits import waiting_bytes
from onefold.cost.search import STATES_SHARE
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost
from onefold.cost.text import format_bytes
from onefold.errors import OffloadError, PlacementWarning
from onefold.model.storage import storage_bytes
from onefold.offload.host_memory import HOST_SHARE, available_bytes
from onefold.optim.preflight import updated_dtype
from onefold.runtime.automatic import automatic_tiers
from onefold.runtime.engine import Engine
from onefold.runtime.held_tensors import host_tensors
from onefold.runtime.moving import move_states
from onefold.settings.offload import Offload
from onefold.settings.placement import Placement, Tier

LOG = logging.getLogger("onefold")
SCRATCH_BYTES = 16  # per element of the largest unit: vectors in fp32 that a class of torch makes in an update
SHORT = 0.9  # of the device's memory, once torch's allocator had to free what it kept


class Placing:
    """Decides for the units of one model, whose optimizer state costs so much. `in_backward` says when they are
    updated, `one_pass` whether kernels of ours do that, where 16 bits compute."""

    def __init__(
        self, engine: Engine, costs: Mapping[torch.dtype, StateCost], *, in_backward: bool, one_pass: bool
    ) -> None:
        self._engine, self._costs, self._in_backward, self._one_pass = engine, costs, in_backward, one_pass

    @property
    def _cost(self) -> StateCost:
        return max(self._costs.values(), key=lambda cost: cost.per_element)

    def before_first_step(self) -> None:
        """Says which units may get their state on the device. Where the host could not hold the masters and gradients
        of the first step, those of the first units are on the device from the start. Collective."""
        engine, resolved, watch = self._engine, self._engine.resolved, self._engine.watch
        if not watch.active or watch.decided:
            return
        given = resolved.units, resolved.settings, resolved.precision, resolved.device, engine.comms
        tiers, _ = automatic_tiers(*given, self._cost, share=FILLED)
        candidates = sum(tier is Tier.DEVICE for tier in tiers.values())
        watch.may_move_first(candidates)
        count, rows, room = len(tiers), self._rows(), self._host_room()
        cost, backward = self._cost, self._in_backward

        def held(first: int) -> int:
            """Bytes in host memory of masters and gradients of all units but the first ones."""
            return host_need(*rows, first, count - first, cost=StateCost(0))

        there, on_host = 0, count
        if self._spills:
            left = max(room - (held(0) - held(candidates)), 0)
            behind, _ = split_offloaded(*rows, candidates, left, cost=cost, in_backward=backward)
            on_host = candidates + behind
        else:
            state = host_need(*rows, candidates, count - candidates, cost=cost) - held(candidates)
            there = next((first for first in range(candidates) if held(first) + state <= room), candidates)
        self._move(in_order(there, on_host, count), resolved.why)

    def by_formula(self, *, final: bool) -> None:
        """Decides before a step has shown what activations take, as state is about to be loaded, or must be made:
        states may take 70% of the device. Unless it is `final`, the first step decides again. Collective."""
        engine, resolved = self._engine, self._engine.resolved
        if not engine.watch.active or engine.watch.decided:
            return
        self._quiesce()
        given = resolved.units, resolved.settings, resolved.precision, resolved.device, engine.comms
        tiers, why = automatic_tiers(*given, self._cost, share=STATES_SHARE)
        move_states(engine, tiers, why)
        if final:
            engine.watch.decide()

    def at_step(self) -> None:
        """Decides, or looks whether what was decided still holds. All gradients of the step are complete. Collective,
        in the same steps on all ranks."""
        watch = self._engine.watch
        if not watch.active:
            return
        parts, first = watch.step_begins(), not watch.decided
        if watch.steps == 2 and not self._in_backward:  # of gradients that the first step brought back to the device
            self._engine.tiers.host.staging.trim()
        if not (first or self._looks(parts)):
            return
        budget, units = watch.budget(), self._units(first=first)
        parts = self._with_buffers(parts) if first else parts
        if first:
            self._quiesce()
            count = self._smallest(most_that_fit(parts, units, int(FILLED * budget) - watch.slack_bytes))
            self._decide(count, needed_bytes(parts, units, count), budget)
            watch.decide()
            return
        there = sum(not unit.updated_on_host for unit in self._engine.units)
        took, short = needed_bytes(parts, units, len(units)), watch.was_short()
        fits = took <= FILLED * budget and not short
        count = there if fits else most_that_fit(parts, units, int((SHORT if short else FILLED) * budget))
        if (count := self._smallest(count)) < there:
            self._leave_device(count, f"a step took {format_bytes(took)} of {format_bytes(budget)}")
            watch.made_room()

    def make_room(self) -> None:
        """The device has run out of memory: state of half of the units that it updates leaves it."""
        units = self._engine.units
        there = sum(not unit.updated_on_host for unit in units)
        sums = any(unit.gradients.waiting for unit in units)
        if there and not sums and self._engine.comms.world.size == 1:  # several ranks could not agree on it
            self._leave_device(there // 2, "the device ran out of memory")
        self._engine.watch.made_room()

    # -- what there is --------------------------------------------------------------------------------------------

    def _looks(self, parts: Sequence[Taken]) -> bool:
        """Whether this step is looked at: each one on one rank; on several ranks, which must agree, the second, fourth,
        eighth and so on."""
        watch = self._engine.watch
        if self._engine.comms.world.size == 1:
            return bool(parts)
        return watch.keeps_looking and watch.steps & (watch.steps - 1) == 0

    def _units(self, *, first: bool) -> list[UnitOnDevice]:
        found = []
        for unit in self._engine.units:
            numel, there = unit.master.owned.numel, not unit.updated_on_host
            master = numel * unit.dtypes.widths.master
            state = master + self._costs[updated_dtype(unit)].vectors(numel) + unit.average_bytes
            gradient = 0 if self._in_backward else unit.gradients.held_bytes
            now, gradient_now = storage_bytes(unit.state_tensors()) * there, gradient * there
            if unit.gradients.stays_on_device:  # from its first use on
                state, gradient = state + gradient, 0
                now, gradient_now = (now, gradient_now) if first else (now + gradient_now, 0)
            found.append(UnitOnDevice(state, gradient, now, gradient_now, may_stay=first or there))
        return found

    def _with_buffers(self, parts: Sequence[Taken]) -> list[Taken]:
        """The parts of the first step, with what later steps need beside it: gradients that wait on the device for host
        updates, and vectors that a class of torch makes in updates."""
        units, pool = self._engine.units, self._engine.pool
        wide = [unit for unit in units if not (self._cost.small or (self._one_pass and unit.dtypes.narrow))]
        scratch = SCRATCH_BYTES * max((unit.master.owned.numel for unit in wide), default=0)
        waiting = waiting_bytes([unit.gradients.held_bytes for unit in units]) if self._in_backward else 0
        waiting = 0 if pool.keeps else waiting  # else there from the start
        kept = storage_bytes([*pool.buffers(), *self._engine.tiers.host.waiting.buffers()]) if pool.keeps else 0
        return [
            part._replace(
                nbytes=part.nbytes
                + (waiting if part.reduced else kept)
                + scratch * (number == len(parts) - 1 or self._in_backward)
            )
            for number, part in enumerate(parts)
        ]

    def _smallest(self, mine: int) -> int:
        rows = self._engine.comms.world.exchange(str(mine).encode(), Label("agree", "memory"))
        self._engine.comm.meter.cut()
        return min(map(int, rows))

    def _quiesce(self) -> None:
        """Waits until no reduction and no update is in flight; users' edits are in masters then."""
        engine = self._engine
        engine.schedule.drain()
        engine.updates.forget_prepared()
        engine.updates.wait()
        for unit in engine.units:
            unit.take_edits()

    # -- decisions ------------------------------------------------------------------------------------------------

    def _decide(self, on_device: int, takes: int, budget: int) -> None:
        engine, units = self._engine, len(self._engine.units)
        on_host, told = self._on_host(on_device)
        room = f"{format_bytes(takes)} of {format_bytes(budget)}"
        why = f"optimizer state of {on_device} of {units} units stays on the device: a step takes {room}{told}"
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()  # so that state does not lie among blocks that activations will need
        self._move(in_order(on_device, on_host, units), why)
        if engine.comms.world.rank == 0:
            LOG.info("%s", why)
            if takes > budget:
                warnings.warn(
                    f"a step takes {room} with no optimizer state on the device: use shorter micro-batches, "
                    f"activations='checkpoint', tiled losses, stage 3 or more ranks", PlacementWarning, stacklevel=4,
                )  # fmt: skip

    def _leave_device(self, count: int, what: str) -> None:
        """Keeps the state of the first `count` units on the device that is there, and says so."""
        engine, before = self._engine, [unit.placement.optimizer_tier for unit in self._engine.units]
        self._quiesce()
        stays = [tier is Tier.DEVICE and number < count for number, tier in enumerate(before)]
        elsewhere = self._elsewhere(sum(stays))
        tiers = [
            Tier.DEVICE if stay else tier if tier is not Tier.DEVICE else elsewhere
            for stay, tier in zip(stays, before, strict=True)
        ]
        left = before.count(Tier.DEVICE) - sum(stays)
        why = (
            f"{what}: optimizer state of {left} units was moved from the device to {elsewhere.value}; of "
            f"{sum(stays)} of {len(tiers)} units it stays"
        )
        self._move(tiers, why)
        if engine.comms.world.rank == 0:
            warnings.warn(why, PlacementWarning, stacklevel=4)

    def _move(self, tiers: Sequence[Tier], why: str) -> None:
        names = [unit.name for unit in self._engine.units]
        move_states(self._engine, dict(zip(names, tiers, strict=True)), why)

    def _elsewhere(self, on_device: int) -> Tier:
        """Where state goes that leaves the device: to the host, or to disk if the host has no room for it."""
        units = len(self._engine.units)
        return Tier.HOST if self._on_host(on_device)[0] == units - on_device else Tier.DISK

    def _on_host(self, on_device: int) -> tuple[int, str]:
        """How many units have their state in host memory, and what to tell of it. Collective."""
        engine, cost, backward, rows = self._engine, self._cost, self._in_backward, self._rows()
        room = self._host_room()
        if self._spills:
            return split_offloaded(*rows, on_device, room, cost=cost, in_backward=backward)
        on_host = len(engine.units) - on_device
        if (needed := host_need(*rows, on_device, on_host, cost=cost, in_backward=backward)) > room:
            raise OffloadError(
                f"the optimizer state of {on_host} of {len(engine.units)} units does not fit on the device and needs "
                f"{format_bytes(needed)} of host memory, but each rank can have {format_bytes(room)}; give "
                f"Offload(path=…) for what does not fit, a smaller state (Optimizer(state='bf16' or '8bit')), shorter "
                f"micro-batches or activations='checkpoint'"
            )
        return on_host, ""

    @property
    def _spills(self) -> bool:
        """Whether state may be on disk."""
        return Offload.of(self._engine.resolved.settings.offload).path is not None and not self._cost.small

    def _rows(self) -> tuple[list[UnitSize], list[Placement]]:
        """All units, and their placements, for formulas."""
        resolved = self._engine.resolved
        sizes = [unit.size(0, resolved.precision) for unit in resolved.units]  # as rank 0 has them, which owns the most
        return sizes, [unit.placement for unit in resolved.units]

    def _host_room(self) -> int:
        """Bytes of host memory that each rank may have, with those that it has. Collective."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        held = sum(storage_bytes(tensors) for tensors in host_tensors(self._engine).values())
        asked = Offload.of(self._engine.resolved.settings.offload).host_bytes
        return self._smallest(asked or int(HOST_SHARE * available_bytes()) // ranks + held)


def keep_off_disk(engine: Engine) -> None:
    """Before the first step decides: masters that shard() has put on disk go to host memory, as state in a small form
    is not kept on disk."""
    on_disk = [unit.name for unit in engine.units if unit.placement.optimizer_tier is Tier.DISK]
    if engine.watch.active and not engine.watch.decided and on_disk:
        move_states(engine, dict.fromkeys(on_disk, Tier.HOST), engine.resolved.why)
