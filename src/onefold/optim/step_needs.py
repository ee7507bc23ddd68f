"""Offload(optimizer="auto"): what a step needs on the device, by what the parts of one took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import ReferenceType

from onefold.cost.filling import Room, Taken, UnitOnDevice, reduced_before
from onefold.cost.limits import waiting_bytes
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost
from onefold.model.storage import storage_bytes
from onefold.runtime.automatic import prefetch_units
from onefold.runtime.engine import Engine
from onefold.settings.placement import Placement, Scope, Tier

SCRATCH_BYTES = 16  # per element of the largest unit: vectors in fp32 that a class of torch makes in an update
NORM_BYTES = 8  # per element of the largest unit: a gradient in fp32, and its squares, for a norm


class WithState(Protocol):
    """What is asked of an Optimizer here."""

    @property
    def indices(self) -> frozenset[int]: ...

    @property
    def state_cost(self) -> StateCost | None: ...

    def full_vectors(self) -> list[int]: ...


class StepNeeds:
    """What steps of one model need. `optimizer` is the one that this belongs to, which the engine may not know yet;
    `in_backward` says when it updates."""

    def __init__(self, engine: Engine, optimizer: ReferenceType[WithState], *, in_backward: bool) -> None:
        self._engine, self._optimizer, self._in_backward = engine, optimizer, in_backward
        self._first_kept = 0  # bytes of buffers that the first step kept

    @property
    def cost(self) -> StateCost:
        """That of the Optimizer whose state takes the most, of this one and the others of the model."""
        mine = self._optimizer()
        costs = [mine.state_cost if mine is not None else None, self._engine.optimizers.state_cost]
        return max((cost for cost in costs if cost is not None), key=lambda cost: cost.per_element)

    def units(self, *, first: bool) -> list[UnitOnDevice]:
        found, sums = [], self._engine.accumulating.wide_sums and not first
        vectors, watch = self.vectors(), self._engine.watch
        for number, unit in enumerate(self._engine.units):
            numel, there = unit.master.owned.numel, not unit.updated_on_host
            master = numel * unit.dtypes.widths.master
            state = master + vectors[number] + unit.average_bytes
            gradient = 0 if self._in_backward else unit.gradients.held_bytes
            now = storage_bytes(unit.state_tensors()) * (there and not unit.parked)
            gradient_now = gradient * there
            if unit.gradients.stays_on_device and sums:  # of micro-batches, wherever the unit is updated
                gradient = gradient_now = 0
            elif unit.gradients.stays_on_device:  # from its first use on
                state, gradient = state + gradient, 0
                now, gradient_now = (now, gradient_now) if first else (now + gradient_now, 0)
            made = max(now - watch.state_bytes_before(unit.name), 0) if watch.steps == 1 and self._in_backward else 0
            # in later steps, and in a pool that keeps them, they were measured
            waits = unit.gradients.held_bytes if first and self._in_backward and not self._engine.pool.keeps else 0
            found.append(UnitOnDevice(state, gradient, now, gradient_now, made, may_stay=first or there, waits=waits))
        return found

    def vectors(self) -> list[int]:
        """Bytes of each unit's optimizer state once all of it has been updated, without step counts."""
        found = [0] * len(self._engine.units)
        for optimizer in self._optimizers():
            for number, nbytes in enumerate(optimizer.full_vectors()):
                found[number] += nbytes
        return found

    def _optimizers(self) -> list[WithState]:
        """The Optimizers of the model, with the one that this belongs to. While that is being made, those that it will
        replace are left out."""
        mine, known = self._optimizer(), list[WithState](self._engine.optimizers)
        if mine is None or any(other is mine for other in known):
            return known
        return [mine, *(other for other in known if not other.indices & mine.indices)]

    def with_buffers(self, parts: Sequence[Taken], *, one_pass: bool) -> list[Taken]:
        """The parts of the first step, with what later steps add to them: buffers that are kept from the step before,
        up to the first complete gradient; units that backward prefetches once their order is known; vectors that a
        class of torch makes in updates, but not kernels of ours in `one_pass`; and in the end those of a norm."""
        units, pool = self._engine.units, self._engine.pool
        small = self.cost.small
        wide = [unit for unit in units if not (small or (one_pass and unit.dtypes.narrow))]
        scratch = SCRATCH_BYTES * max((unit.master.owned.numel for unit in wide), default=0)
        norm = NORM_BYTES * max((unit.master.owned.numel for unit in units), default=0)
        at_end = max(scratch, 0 if self._in_backward else norm)  # step_in_backward does not clip
        stays = pool.keeps and any(unit.dtypes.narrow for unit in wide)  # fp32 vectors of an update are the pool's
        kept = self._first_kept = self.kept_bytes()
        sizes, placements = self.rows()
        sharded = [size for size, row in zip(sizes, placements, strict=True) if row.parameters is Scope.SHARDED]
        ahead = prefetch_units(self._engine.resolved.settings) * max((s.unsharded_bytes for s in sharded), default=0)
        found = []
        for number, (part, before) in enumerate(zip(with_kept(parts, kept), reduced_before(parts), strict=True)):
            updates = self._in_backward and bool(before)
            vectors = at_end if number == len(parts) - 1 else scratch if updates or stays else 0
            found.append(part._replace(nbytes=part.nbytes + ahead + vectors))
        return found

    def kept_bytes(self) -> int:
        """Bytes of buffers that steps keep from one to the next, which forward and the first part of backward may not
        have needed."""
        pool = self._engine.pool
        return storage_bytes([*pool.buffers(), *self._engine.tiers.host.waiting.buffers()]) if pool.keeps else 0

    def more_waiting(self) -> int:
        """Bytes of gradients that wait on the device for host updates, at most, if more units have them."""
        if not self._in_backward:  # as in the first step, whose gradients all went to the host
            return max(self._first_kept - self.kept_bytes(), 0)
        units = self._engine.units
        now = waiting_bytes([unit.gradients.held_bytes for unit in units if unit.updated_on_host])
        return waiting_bytes([unit.gradients.held_bytes for unit in units]) - now

    def room(self, parts: list[Taken]) -> Room:
        return Room(parts, self.units(first=False))

    def may_stay(self) -> list[int]:
        """The units, by number, that the device could update: those whose parameters are there."""
        units = enumerate(self._engine.units)
        return [number for number, unit in units if unit.placement.parameters_tier is Tier.DEVICE]

    def there(self) -> list[int]:
        """The units, by number, that the device updates."""
        return [number for number, unit in enumerate(self._engine.units) if not unit.updated_on_host]

    def rows(self) -> tuple[list[UnitSize], list[Placement]]:
        """All units, and their placements, for formulas."""
        resolved = self._engine.resolved
        sizes = [unit.size(0, resolved.precision) for unit in resolved.units]  # as rank 0 has them, which owns the most
        return sizes, [unit.placement for unit in resolved.units]


def with_kept(parts: Sequence[Taken], kept_bytes: int) -> list[Taken]:
    """The parts of a step, with `kept_bytes` more in each up to the first complete gradient.

    >>> parts = with_kept([Taken(5), Taken(9, frozenset([1])), Taken(8, frozenset([0, 1]))], 2)
    >>> [part.nbytes for part in parts]
    [7, 11, 8]
    """
    return [
        part if before else part._replace(nbytes=part.nbytes + kept_bytes)
        for part, before in zip(parts, reduced_before(parts), strict=True)
    ]
