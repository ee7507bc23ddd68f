"""Offload(optimizer="auto"): where the optimizer state of each unit is, decided by the memory that a step took.

1 The first step runs with masters in host memory or on disk, and without any optimizer state. What it takes on the
  device is what parameters, activations and gradients on their way need.
2 When its gradients are complete, parameters that began in host memory come to the device, as many as fit, and blocks
  that were computed again keep their activations (raising.py).
3 As many units as fit into 95% of the device beside that get their state there, the others in host memory, and those
  that do not fit there on disk: of all such splits that the disk holds the one with the fewest planned seconds
  (cost/splits.py). Then the step updates them.
4 If a later forward may take more (longer sequences, accumulation), state is parked before it (runtime/parking.py). If
  the step did take more, the state of some of these units leaves the device; if that is not enough, blocks are computed
  again, and then parameters leave.

All ranks decide alike, by the fullest of them. On one kind of device, results do not depend on where state
is kept.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from weakref import ReferenceType

import torch

from onefold.cost.automatic import host_need, split_offloaded
from onefold.cost.filling import FILLED, Room, Taken, with_blocks
from onefold.cost.search import STATES_SHARE
from onefold.cost.text import format_bytes
from onefold.errors import PlacementWarning
from onefold.model.storage import storage_bytes
from onefold.optim.disk_room import DiskRoom
from onefold.optim.first_placement import UnitTable, with_disk, without_disk
from onefold.optim.fullest_rank import FullestRank
from onefold.optim.possible_splits import PossibleSplits, on_tier
from onefold.optim.raising import (
    blocks_of,
    lower_parameters,
    raise_parameters,
    raise_parameters_by_formula,
    raise_parameters_of,
)
from onefold.optim.step_needs import StepNeeds, WithState, with_kept
from onefold.runtime.automatic import automatic_tiers, host_bytes_of, parameters_are_automatic
from onefold.runtime.engine import Engine
from onefold.runtime.held_tensors import host_tensors
from onefold.runtime.moving import move_states
from onefold.runtime.no_parking import Known
from onefold.runtime.seen_inputs import Growth
from onefold.settings.placement import Tier

LOG = logging.getLogger("onefold")
SHORT = 0.9  # of the device's memory, once torch's allocator had to free what it kept


class Placing:
    """Decides for the units of one model. `optimizer` is the one that this belongs to; `in_backward` says when it
    updates, and `parks` whether optimizer state may be in host memory while a step runs."""

    def __init__(self, engine: Engine, optimizer: ReferenceType[WithState], *, in_backward: bool, parks: bool) -> None:
        self._engine, self._in_backward, self._agreed = engine, in_backward, FullestRank(engine)
        self._needs = StepNeeds(engine, optimizer, in_backward=in_backward)
        self._disk = DiskRoom(engine, self._needs, self._agreed)
        self._splits = PossibleSplits(engine, self._needs, self._agreed, self._disk, in_backward=in_backward)
        self._parks = parks
        self._first_parts: list[Taken] = []  # of a first step that was refused, and may be repeated as it is

    def before_first_step(self) -> None:
        """Says which units wait for the end of the first step, and where their masters wait. Collective."""
        engine, resolved, watch = self._engine, self._engine.resolved, self._engine.watch
        if not watch.active or watch.decided:
            return
        given = resolved.units, resolved.settings, resolved.precision, resolved.device, engine.comms
        tiers, _ = automatic_tiers(*given, self._needs.cost, share=FILLED)
        candidates = [at for at, tier in enumerate(tiers.values()) if tier is Tier.DEVICE]
        units, room = UnitTable(*self._needs.rows(), self._needs.cost), self._splits.host_room()
        if self._disk.used:
            first = with_disk(units, candidates, room, self._disk, in_backward=self._in_backward)
            self._disk.check(first.tiers, first.waiting)
        else:
            first = without_disk(units, candidates, room)
        watch.may_move_units(first.waiting)
        self._move(first.tiers, resolved.why)

    def by_formula(self) -> None:
        """Decides for good before a step has shown what activations take, where units cannot wait for step(): states
        may take 70% of the device. Collective."""
        engine, resolved = self._engine, self._engine.resolved
        if not engine.watch.active or engine.watch.decided:
            return
        self._quiesce()
        raise_parameters_by_formula(
            engine, int(STATES_SHARE * self._agreed.smallest(engine.watch.budget())), self._agreed.common
        )
        resolved = engine.resolved
        given = resolved.units, resolved.settings, resolved.precision, resolved.device, engine.comms
        tiers, why = automatic_tiers(*given, self._needs.cost, share=STATES_SHARE)
        self._disk.check(list(tiers.values()))
        move_states(engine, tiers, why)
        engine.watch.decide()

    def before_load(self) -> None:
        """State is about to be loaded, and the first step has not shown what activations take: it waits for that step
        in host memory, and on disk what the host cannot hold. Where there is no disk, or one that is too small, as few
        units as can be have it on the device. Collective."""
        engine, resolved = self._engine, self._engine.resolved
        if not engine.watch.active or engine.watch.decided:
            return
        self._quiesce()
        room, rows, cost, disk = self._splits.host_room(), self._needs.rows(), self._needs.cost, self._disk
        every = range(len(engine.units))
        movable = every if parameters_are_automatic(resolved.settings, resolved.device, engine.comms) else ()
        order = list(dict.fromkeys([*self._needs.may_stay(), *movable]))
        most_bytes = int(FILLED * self._agreed.smallest(engine.watch.budget()))
        for there in (order[:n] for n in range(len(order) + 1)):
            tiers = split_offloaded(*rows, there, room if disk.used else None, cost=cost)
            fits = disk.fits(tiers) if disk.used else host_need(*rows, tiers, cost=cost) <= room
            if fits or (disk.used and self._agreed.largest(disk.state_bytes(there)) > most_bytes):
                break
        disk.check(tiers)
        raise_parameters_of(engine, [engine.units[number].name for number in there])
        self._move(tiers, engine.resolved.why)

    def at_step(self, one_pass: Callable[[], bool]) -> None:
        """Decides, or looks whether what was decided still holds. All gradients of the step are complete. Collective,
        in the same steps on all ranks. `one_pass` says whether kernels of ours update where 16 bits compute."""
        watch = self._engine.watch
        if not watch.active:
            return
        watched, first = watch.watching, not watch.decided
        parts = watch.step_begins()
        if watch.steps == 2 and not self._in_backward:  # of gradients that the first step brought back to the device
            self._engine.tiers.host.staging.trim()
        if first:
            self._quiesce()
            if watched or not self._first_parts:
                self._first_parts = self._needs.with_buffers(parts, one_pass=one_pass())
            self._fill(watch.budget())
            watch.decide()
            self._first_parts = []
        elif self._engine.alike.some_take_more or self._looks(parts):
            self._look(parts)
            self._engine.parking.bring_back()
        else:
            self._look_away()
        self._engine.alike.forget_more()

    def _look(self, parts: list[Taken]) -> None:
        """Looks whether what was decided still holds, by the parts of this step; none if this rank did not watch it.
        State that is parked comes back, as far as it fits. Collective."""
        watch, budget, parking = self._engine.watch, self._engine.watch.budget(), self._engine.parking
        known = (parking.known if parts else parking.expected) or Known(0, 0)
        returned = parking.return_parameters()
        kept = self._needs.kept_bytes() if parking.active else 0  # parking has freed what was not in use
        parts = with_kept([part._replace(nbytes=part.nbytes + returned) for part in parts], kept)
        room, bare, there = self._with_kept_blocks(parts), self._needs.room(parts), self._needs.there()
        took, short = room.needed_bytes(there), watch.was_short()
        fits = took <= FILLED * budget and not short
        if self._agreed.smallest(fits):  # on every rank
            self._know(known, room, there, there)
            return
        most_bytes = int((SHORT if short else FILLED) * budget) - self._needs.more_waiting()
        most_bytes = max(took, most_bytes) if fits else most_bytes
        what = f"a step took {format_bytes(int(self._agreed.largest(took)))} of {format_bytes(budget)}"
        freed = room is not bare and room.needed_bytes(()) > most_bytes and self._free_more(0, what)
        room = bare if freed else room
        planned = self._splits.planned_seconds()
        stays = on_tier(self._splits.fastest(planned, room, most_bytes, there), Tier.DEVICE)
        if stays != there:
            self._leave_device(stays, what)
        self._know(known, room, there, stays)
        excess = int(self._agreed.largest(room.needed_bytes(stays) - most_bytes))
        freed = (excess > 0 and self._free_more(excess, what)) or freed
        if freed or stays != there:
            watch.made_room()
        if excess > 0 and not freed and stays != there and self._engine.comms.world.rank == 0:
            said = f"{what}, and {format_bytes(excess)} too many with no optimizer state on the device"
            warnings.warn(f"{said}: {self._splits.remedies()}", PlacementWarning, stacklevel=4)

    def _with_kept_blocks(self, parts: list[Taken]) -> Room:
        """What a step takes if blocks keep their activations again that were computed again in this one."""
        parking, choice = self._engine.parking, self._engine.block_choice
        grown, kept = parking.grow_blocks(), parking.keep_blocks_again()
        if choice is None or not kept:
            return self._needs.room(parts)
        if not grown:
            choice.keep_last(0)
            return self._needs.room(parts)
        return self._needs.room(with_blocks(parts, blocks_of(self._engine, choice)[-kept:], choice.more_bytes))

    def _look_away(self) -> None:
        """This step is not looked at. Where something is parked, that was told too late for this step, or there was no
        look for another reason: it comes back, and the next forward with such inputs is one that may take more."""
        parking = self._engine.parking
        if parking.active:
            parking.keep_blocks_again()
            parking.bring_back()
            parking.expect_no_more()
        parking.grow_blocks()
        parking.learn(parking.expected)

    def _know(self, known: Known, room: Room, before: Collection[int], stays: Collection[int]) -> None:
        """Remembers what steps take with the state of the units that stay on the device, of those `before`, if `known`
        is what they took until now."""
        freed = room.needed_bytes(before) - room.needed_bytes(stays)
        took = max(known.took - max(freed, 0), room.needed_bytes(stays))
        self._engine.parking.learn(Known(took, max(known.least, room.needed_bytes(()))))

    def make_room(self) -> None:
        """The device has run out of memory: state of half of the units that it updates leaves it."""
        units, there = self._engine.units, self._needs.there()
        sums = any(unit.gradients.waiting for unit in units)
        if there and not sums and self._engine.comms.world.size == 1:  # several ranks could not agree on it
            self._leave_device(there[: len(there) // 2], "the device ran out of memory")
        self._engine.watch.made_room()

    def make_way(self, growth: Growth) -> None:
        """A forward begins that may take so much more memory than any before. Unless it is known to fit beside
        optimizer state, that state is parked until step() decides. This rank alone."""
        engine, watch, parking = self._engine, self._engine.watch, self._engine.parking
        if not self._parks or engine.everyone.size < engine.comms.world.size:  # ranks of "tp" would not hear of it
            return
        excess, expected = math.inf, None
        if parking.expected is not None and not math.isinf(growth.times):
            more = int(parking.expected.least * max(growth.times - 1, 0))
            if growth.sums:
                more += sum(unit.gradients.held_bytes + unit.gradients.reducing_bytes for unit in engine.units)
            expected = Known(parking.expected.took + more, parking.expected.least + more)
            excess = expected.took - parking.parked_bytes - int(FILLED * watch.budget())
        parking.expected = expected
        parking.growth *= max(growth.times, 1.0)
        if excess <= 0:
            return
        held = sum(storage_bytes(tensors) for tensors in host_tensors(engine).values())
        host_bytes = host_bytes_of(engine.resolved.settings, held) - held
        watch.watch_after(lambda: parking.begin(excess, host_bytes, in_backward=self._in_backward))
        engine.alike.takes_more = True

    # -- what there is --------------------------------------------------------------------------------------------

    def _looks(self, parts: Sequence[Taken]) -> bool:
        """Whether this step is looked at: each one on one rank; on several ranks, which must agree, the second, fourth,
        eighth and so on."""
        watch = self._engine.watch
        if self._engine.comms.world.size == 1:
            return bool(parts)
        return watch.keeps_looking and watch.steps & (watch.steps - 1) == 0

    def _quiesce(self) -> None:
        """Waits until no reduction and no update is in flight; users' edits are in masters then."""
        engine = self._engine
        engine.schedule.drain()
        engine.updates.forget_prepared()
        engine.updates.wait()
        for unit in engine.units:
            unit.take_edits()

    # -- decisions ------------------------------------------------------------------------------------------------

    def _fill(self, budget: int) -> None:
        """Fills the device after the first step, whose parts are known. Collective."""
        engine, most_bytes = self._engine, int(FILLED * budget) - self._engine.watch.slack_bytes
        most_bytes = self._agreed.smallest(most_bytes)
        units, common = self._needs.units(first=True), self._agreed.common
        parts = self._first_parts = raise_parameters(engine, self._first_parts, units, most_bytes, common)
        took = int(self._agreed.largest(Room(parts, self._needs.units(first=True)).needed_bytes(())))
        if took > most_bytes:  # parameters that a formula put on the device, such as for loaded state
            lowered = lower_parameters(engine, took - most_bytes, f"a step takes {format_bytes(took)}")
            parts = self._first_parts = [part._replace(nbytes=part.nbytes - lowered.nbytes) for part in parts]
        planned = self._splits.planned_seconds()
        parts = self._splits.keep_blocks(planned, parts, most_bytes)
        room = Room(parts, self._needs.units(first=True))
        tiers = self._splits.fastest(planned, room, most_bytes, self._needs.may_stay())
        self._know(Known(0, 0), room, (), on_tier(tiers, Tier.DEVICE))
        self._decide(tiers, room.needed_bytes(on_tier(tiers, Tier.DEVICE)), budget, planned.host_bytes)

    def _free_more(self, excess_bytes: int, what: str) -> bool:
        """Frees bytes of a device that has no optimizer state left: all blocks are computed again, or if they are
        already, parameters leave until `excess_bytes` are free. False if there is nothing to free. The same on all
        ranks."""
        engine, choice = self._engine, self._engine.block_choice
        if choice is not None and choice.kept:
            said = f"{choice.kept} blocks that kept their activations are computed again"
            choice.keep_last(0)
            engine.tell_activations(f"all blocks are computed again: {what}")
        else:
            self._quiesce()
            said = lower_parameters(engine, excess_bytes, what).told
        if said and engine.comms.world.rank == 0:
            warnings.warn(f"{what}: {said}", PlacementWarning, stacklevel=5)
        return bool(said)

    def _decide(self, tiers: Sequence[Tier], takes: int, budget: int, host_bytes: int) -> None:
        engine, staying = self._engine, tiers.count(Tier.DEVICE)
        told = self._splits.checked(tiers, host_bytes)
        self._disk.check(tiers)
        room = f"{format_bytes(takes)} of {format_bytes(budget)}"
        why = f"optimizer state of {staying} of {len(tiers)} units stays on the device: a step takes {room}{told}"
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()  # so that state does not lie among blocks that activations will need
        self._move(tiers, why)
        if engine.comms.world.rank == 0:
            LOG.info("%s", why)
            if takes > budget:
                warnings.warn(
                    f"a step takes {room} with no optimizer state on the device: {self._splits.remedies()}",
                    PlacementWarning, stacklevel=4,
                )  # fmt: skip

    def _leave_device(self, stays: Collection[int], what: str) -> None:
        """Moves optimizer state off the device but for that of the units `stays`, and warns. Collective."""
        engine, before = self._engine, [unit.placement.optimizer_tier for unit in self._engine.units]
        self._quiesce()
        planned = self._splits.planned_seconds()
        tiers = self._splits.split(planned, stays, lambda chosen: True)  # units that were in host memory may go to disk
        self._splits.checked(tiers, planned.host_bytes)
        self._disk.check(tiers)
        gone = {new for old, new in zip(before, tiers, strict=True) if old is Tier.DEVICE} - {Tier.DEVICE}
        left = before.count(Tier.DEVICE) - tiers.count(Tier.DEVICE)
        why = (
            f"{what}: optimizer state of {left} units was moved from the device to "
            f"{' and '.join(sorted((tier.value for tier in gone), reverse=True))}; of "
            f"{tiers.count(Tier.DEVICE)} of {len(tiers)} units it stays"
        )
        self._move(tiers, why)
        if engine.comms.world.rank == 0:
            warnings.warn(why, PlacementWarning, stacklevel=5)

    def _move(self, tiers: Sequence[Tier], why: str) -> None:
        names = [unit.name for unit in self._engine.units]
        move_states(self._engine, dict(zip(names, tiers, strict=True)), why)


def keep_off_disk(engine: Engine) -> None:
    """Before the first step decides: masters that shard() has put on disk go to host memory, as state in a small form
    is not kept on disk."""
    on_disk = [unit.name for unit in engine.units if unit.placement.optimizer_tier is Tier.DISK]
    if engine.watch.active and not engine.watch.decided and on_disk:
        move_states(engine, dict.fromkeys(on_disk, Tier.HOST), engine.resolved.why)
