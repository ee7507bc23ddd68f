"""Bytes of gradients and of reduction buffers while backward computes gradients, unit by unit.

A reduction takes buffers from the pool and leaves a gradient that waits for the update. On CUDA the allocator reuses
both, so they grow as backward goes on. On a CPU a pool keeps the buffers and units keep their gradients, so after the
first step a rank always has them all. The reductions are simulated with the rules of the runtime and of its pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        return GradientBytes(max(self[0], other[0]), max(self[1], other[1]))


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
        if not self._free:
            self.all_bytes += nbytes
            return Buffer(nbytes, nbytes)
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


class UnitBytes(NamedTuple):
    """What the reduction of one unit takes, in bytes; the same for all units of these sizes."""

    on_host: bool  # the host updates it
    in_place: bool  # a replicated gradient is reduced in the buffer in which it stays
    local: int | None  # the fp32 buffer in which 16-bit gradients of a micro-batch add up, where another one travels
    flat: int  # the buffer that travels
    scratch: int
    sum: int | None  # fp32 scratch of a sum of 16 bits
    copied: int  # the gradient that goes to the host
    waiting: int  # the gradient that waits for the update on the device
    fresh: int
    grows: bool  # the first gradient does not take the memory of all


class ReductionInFlight(NamedTuple):
    """A reduction in flight, and the buffers it has taken."""

    unit: UnitBytes
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
        self._at_once = (
            cuda and strategy.ranks > 1
        )  # over NCCL sums are enqueued when a reduction starts, not at its end
        self._known: dict[Any, UnitBytes] = {}
        self._waiting = 0  # bytes of gradients
        self._room, self._used_room = room, 0  # bytes that may wait for the host, and the most that have waited
        self._flight: deque[ReductionInFlight] = deque()
        self._copying: deque[list[Buffer]] = deque()  # buffers being copied to the host
        self._fullest = GradientBytes()  # while reductions end

    @property
    def _current(self) -> GradientBytes:
        return GradientBytes(self._waiting, self._pool.all_bytes + min(self._room, self._used_room))

    def add(self, unit: UnitBytes) -> Arrival:
        """Adds the gradients of a unit, and starts its reduction."""
        before, taken = self._current, []
        local = None if unit.local is None else self._pool.take(unit.local)
        if local is not None:
            taken.append(local)
        elif unit.on_host or not unit.in_place:
            taken.append(self._pool.take(unit.flat))
        else:
            self._waiting += unit.waiting
        filling = self._fullest = self._current
        while len(self._flight) >= IN_FLIGHT:
            self._finish_oldest()
        if local is not None:
            taken.append(self._pool.take(unit.flat))
        taken.append(self._pool.take(unit.scratch))
        if self._at_once:
            self._take_for_sum(unit, taken)
        elif local is not None:
            taken.remove(local)
            self._pool.give(local)
        self._flight.append(ReductionInFlight(unit, taken))
        done = self._fullest.at_most(self._current)
        return Arrival(before if unit.grows else filling, filling, done, unit.fresh)

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
        taken = [self._pool.take(numel * 4) for _ in range(2 if unit.widths.master == 2 else 1)]
        for buffer in taken:
            self._pool.give(buffer)

    def _finish_oldest(self) -> None:
        unit, taken = self._flight.popleft()
        if unit.on_host:
            self._copying.append([taken.pop(0) if unit.in_place else self._pool.take(unit.copied)])
        if not self._at_once:
            self._take_for_sum(unit, taken)
        self._fullest = self._fullest.at_most(self._current)
        if self._in_backward:
            self._waiting -= unit.waiting
        while len(self._copying) > (COPYING if self._cuda and not self._room else 0):
            taken += self._copying.popleft()
            self._used_room += taken[-1].nbytes
        for buffer in taken:
            self._pool.give(buffer)

    def _take_for_sum(self, unit: UnitBytes, taken: list[Buffer]) -> None:
        """Takes the gradient that waits for the update, and scratch of the sum."""
        if not unit.on_host and not unit.in_place:
            self._waiting += unit.waiting
        if unit.sum is not None:
            taken.append(self._pool.take(unit.sum))

    def bytes_of(self, unit: UnitSize, placement: Placement) -> UnitBytes:
        """What the reduction of a unit takes."""
        # Units come by the hundred and are of few sizes. A placement and widths are many units' own objects.
        key = (
            unit.numel, unit.shard, unit.used_numel, unit.largest_numel, unit.param_count, bool(unit.blocks),
            id(unit.widths), id(placement),
        )  # fmt: skip
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._bytes_of(unit, placement)
        return found

    def _bytes_of(self, unit: UnitSize, placement: Placement) -> UnitBytes:
        wire, sharded = self._wire(unit), placement.gradients is Scope.SHARDED
        unflattened = self._unflattened(unit, placement)
        apart = unit.widths.narrow and sharded and wire != unit.widths.sums
        return UnitBytes(
            on_host=placement.updated_on_host,
            in_place=not sharded and (unit.widths.grad == wire or unflattened),
            local=unit.numel * unit.widths.sums if self._accumulates and apart else None,
            flat=unit.numel * wire,
            scratch=self._strategy.scratch_numel(unit.shard, wire) * wire,
            sum=unit.shard * 4 if unit.widths.narrow and not unflattened else None,
            copied=(unit.shard if sharded else unit.numel) * unit.widths.grad,
            waiting=self._counted * gradient_bytes(unit, placement),
            fresh=0 if unflattened else unit.largest_numel * unit.widths.compute,
            grows=unit.param_count == 1 or (unflattened and bool(unit.blocks)),
        )

    def _unflattened(self, unit: UnitSize, placement: Placement) -> bool:
        """Whether gradients stay in autograd's own tensors, as they do with one rank."""
        one_rank = self._cuda and self._ranks == 1 and not placement.updated_on_host
        return one_rank and unit.widths.unflattened

    def _wire(self, unit: UnitSize) -> int:
        """Bytes per element of a reduction's buffers; with one rank nothing is sent, so nothing is widened for it."""
        return unit.widths.wire if self._ranks > 1 else min(unit.widths.wire, unit.widths.grad)


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
    if cuda and (kept := _copied_last(rows)):  # a step before this one leaves buffers that are still being copied
        for row in reversed(kept):
            if row[0].trained:
                reductions.add(reductions.bytes_of(*row))
        reductions.drain()
    reductions.next_step(others)
    found = [
        reductions.add(reductions.bytes_of(*row)) if row[0].trained else reductions.without_gradients()
        for row in reversed(rows)
    ]
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


def _copied_last(rows: Sequence[tuple[UnitSize, Placement]]) -> Sequence[tuple[UnitSize, Placement]]:
    """The last units of a backward, up to the COPYING ones whose gradients the host still gets when it has ended."""
    found = 0
    for number, (unit, placement) in enumerate(rows, 1):
        found += unit.trained and placement.updated_on_host
        if found == COPYING:
            return rows[:number]
    return rows if found else ()
