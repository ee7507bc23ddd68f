"""Bytes of gradients and of reduction buffers while backward computes gradients, unit by unit.

A reduction takes buffers from the pool and leaves a gradient that waits for the update. On CUDA the allocator reuses
both, so they grow as backward goes on. On a CPU a pool keeps the buffers and units keep their gradients, so after the
first step a rank always has them all. The reductions are simulated with the rules of the runtime and of its pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from onefold.comm.fitting import fit
from onefold.comm.strategy import Strategy
from onefold.cost.limits import COPYING, IN_FLIGHT
from onefold.cost.sizes import UnitSize
from onefold.cost.states import gradient_bytes, updated_numel
from onefold.settings.placement import Placement, Scope


class GradientBytes(NamedTuple):
    """Bytes that gradients take at one instant."""

    gradients: int = 0  # of gradients that wait for the update
    buffers: int = 0  # of reductions

    def at_most(self, other: GradientBytes) -> GradientBytes:
        return GradientBytes(*map(max, self, other))


class Arrival(NamedTuple):
    """The bytes at the instants around the gradients of one unit."""

    before: GradientBytes = GradientBytes()  # as `filling` where the first gradient takes the memory of all
    filling: GradientBytes = GradientBytes()
    done: GradientBytes = GradientBytes()  # the unit is complete: its reduction starts, and the oldest one ends
    fresh: int = 0  # bytes of the largest gradient in autograd's own tensor, until it is copied
    beside: int = 0  # of `fresh`, bytes beside the widest activations: in a recomputed block that shares its unit
    after: GradientBytes = GradientBytes()  # of the last unit: backward has ended, and the remaining reductions end


class Buffer(NamedTuple):
    """A buffer that was taken from the pool."""

    nbytes: int  # that were asked for
    whole_bytes: int  # of the pool's buffer, which may be larger


class Pool:
    """The bytes of the runtime's pool of buffers."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._free: list[int] = []
        self.all_bytes = 0  # of all buffers, free and taken

    def take(self, nbytes: int) -> Buffer:
        index, large_enough = fit(self._free, nbytes)
        found = 0 if index is None else self._free.pop(index)
        if large_enough:
            return Buffer(nbytes, found)
        self.all_bytes += nbytes - found
        return Buffer(nbytes, nbytes)

    def give(self, buffer: Buffer) -> None:
        if self._keeps:
            self._free.append(buffer.whole_bytes)
        else:
            self.all_bytes -= buffer.whole_bytes


class ReductionInFlight(NamedTuple):
    """A reduction in flight, and the buffers it has taken."""

    unit: UnitSize
    placement: Placement
    taken: list[Buffer]


class Reductions:
    """The reductions of one backward. With `counted`, gradients that wait for the update are counted. With updates
    `in_backward`, a gradient is freed with its update. Of units that the host updates, `room` bytes of gradients may
    wait on the device. Gradients that add up over micro-batches (`accumulates`) are summed in the width of
    their unit's `sums`."""

    def __init__(
        self, strategy: Strategy, *, cuda: bool, in_backward: bool, counted: bool, room: int, accumulates: bool
    ) -> None:
        self._pool = Pool(keeps=not cuda)
        self._strategy, self._ranks, self._cuda, self._in_backward = strategy, strategy.ranks, cuda, in_backward
        self._counted, self._accumulates = counted, accumulates
        self._waiting = 0  # bytes of gradients
        self._room, self._used_room = room, 0  # bytes that may wait for the host, and the most that have waited
        self._flight: deque[ReductionInFlight] = deque()
        self._copying: deque[list[Buffer]] = deque()  # buffers being copied to the host
        self._fullest = GradientBytes()  # while reductions end

    @property
    def _current(self) -> GradientBytes:
        return GradientBytes(self._waiting, self._pool.all_bytes + min(self._room, self._used_room))

    def add(self, unit: UnitSize, placement: Placement) -> Arrival:
        """Adds the gradients of a unit, and starts its reduction."""
        before, taken = self._current, []
        local = self._local(unit, placement)
        if local is not None:
            taken.append(local)
        elif placement.updated_on_host or not self._in_place(unit, placement):
            taken.append(self._take(unit.numel, self._wire(unit)))
        else:
            self._wait_for_update(unit, placement)
        filling = self._fullest = self._current
        while len(self._flight) >= IN_FLIGHT:
            self._finish_oldest()
        wire = self._wire(unit)
        if local is not None:
            taken.append(self._take(unit.numel, wire))
        taken.append(self._take(self._strategy.scratch_numel(unit.shard, wire), wire))
        if self._at_once:
            self._take_for_sum(unit, placement, taken)
        elif local is not None:
            taken.remove(local)
            self._pool.give(local)
        self._flight.append(ReductionInFlight(unit, placement, taken))
        one_by_one = self._unflattened(unit, placement)
        fresh = 0 if one_by_one else unit.largest_numel * unit.widths.compute
        grows = unit.param_count == 1 or (one_by_one and unit.blocks)
        return Arrival(before if grows else filling, filling, self._fullest.at_most(self._current), fresh)

    def drain(self) -> GradientBytes:
        """Ends all reductions; the most bytes meanwhile."""
        self._fullest = self._current
        while self._flight:
            self._finish_oldest()
        return self._fullest

    def without_gradients(self) -> Arrival:
        """The bytes around a unit that has no gradients."""
        return Arrival(self._current, self._current, self._current)

    def next_step(self, waiting: int) -> None:
        """Begins another step, with `waiting` bytes of gradients of other units. Buffers being copied to the host stay
        until others follow them."""
        self._waiting, self._used_room = waiting, 0

    def fill_room(self) -> None:
        """Lets as many gradients wait for the host as may ever wait."""
        self._used_room = self._room

    def update(self, unit: UnitSize, placement: Placement) -> None:
        """Takes and returns the fp32 vectors that an update by torch's class needs where 16 bits compute."""
        numel = updated_numel(unit, placement)
        taken = [self._take(numel, 4) for _ in range(2 if unit.widths.master == 2 else 1)]
        for buffer in taken:
            self._pool.give(buffer)

    def _finish_oldest(self) -> None:
        unit, placement, taken = self._flight.popleft()
        in_place = self._in_place(unit, placement)
        if placement.updated_on_host:
            summed = unit.shard if placement.gradients is Scope.SHARDED else unit.numel
            self._copying.append([taken.pop(0) if in_place else self._take(summed, unit.widths.grad)])
        if not self._at_once:
            self._take_for_sum(unit, placement, taken)
        self._fullest = self._fullest.at_most(self._current)
        if self._in_backward:
            self._waiting -= self._counted * gradient_bytes(unit, placement)
        while len(self._copying) > (COPYING if self._cuda and not self._room else 0):
            taken += self._copying.popleft()
            self._used_room += taken[-1].nbytes
        for buffer in taken:
            self._pool.give(buffer)

    @property
    def _at_once(self) -> bool:
        """Whether sums are enqueued when a reduction starts, and not computed when it ends: over NCCL."""
        return self._cuda and self._ranks > 1

    def _take_for_sum(self, unit: UnitSize, placement: Placement, taken: list[Buffer]) -> None:
        """Takes the gradient that waits for the update, and scratch of the sum."""
        if not placement.updated_on_host and not self._in_place(unit, placement):
            self._wait_for_update(unit, placement)
        if unit.widths.narrow and not self._unflattened(unit, placement):
            taken.append(self._take(unit.shard, 4))

    def _local(self, unit: UnitSize, placement: Placement) -> Buffer | None:
        """The buffer in which 16-bit gradients of a micro-batch add up, where another one travels."""
        sums = unit.widths.sums
        apart = unit.widths.narrow and placement.gradients is Scope.SHARDED and self._wire(unit) != sums
        return self._take(unit.numel, sums) if self._accumulates and apart else None

    def _in_place(self, unit: UnitSize, placement: Placement) -> bool:
        """Whether a replicated gradient is reduced in the buffer in which it stays."""
        replicated = placement.gradients is Scope.REPLICATED
        return replicated and (unit.widths.grad == self._wire(unit) or self._unflattened(unit, placement))

    def _unflattened(self, unit: UnitSize, placement: Placement) -> bool:
        """Whether gradients stay in autograd's own tensors, as they do with one rank."""
        one_rank = self._cuda and self._ranks == 1 and not placement.updated_on_host
        return one_rank and unit.widths.unflattened

    def _wire(self, unit: UnitSize) -> int:
        """Bytes per element of a reduction's buffers; with one rank nothing is sent, so nothing is widened for it."""
        return unit.widths.wire if self._ranks > 1 else min(unit.widths.wire, unit.widths.grad)

    def _wait_for_update(self, unit: UnitSize, placement: Placement) -> None:
        self._waiting += self._counted * gradient_bytes(unit, placement)

    def _take(self, numel: int, width: int) -> Buffer:
        return self._pool.take(numel * width)


def arrivals(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    strategy: Strategy,
    *,
    cuda: bool,
    one_pass: bool,
    in_backward: bool = False,
    accumulates: bool = False,
    others: int = 0,
    room: int = 0,
) -> list[Arrival]:
    """The Arrival of each unit. On a CPU it is the same for all: the buffers that a rank has after its first steps. On
    CUDA gradients are counted too, unless they accumulate over micro-batches and stay; `others` are bytes of gradients
    of units that come before all of these in backward, `room` those that may wait on the device for the host."""
    rows = list(zip(units, placements, strict=True))
    reductions = Reductions(
        strategy, cuda=cuda, in_backward=in_backward, counted=cuda and not accumulates, room=room,
        accumulates=accumulates,
    )  # fmt: skip
    found: list[Arrival] = []
    for _ in range(2 if cuda and any(placement.updated_on_host for placement in placements) else 1):
        reductions.next_step(others)
        found = [reductions.add(*row) if row[0].trained else reductions.without_gradients() for row in reversed(rows)]
        end = reductions.drain()
    if cuda:
        found[-1:] = [last._replace(after=end) for last in found[-1:]]
        return found[::-1]
    for unit, placement in rows if not one_pass else ():
        if unit.trained and unit.widths.narrow and not placement.updated_on_host:
            reductions.update(unit, placement)
    reductions.fill_room()
    end = reductions.drain()
    return [Arrival(end, end, end)] * len(rows)
