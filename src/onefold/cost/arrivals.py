"""What gradients take while backward brings them, unit by unit.

Rounds borrow buffers and leave gradients that wait for the update. On CUDA both are the allocator's between their uses:
they grow as backward goes on. On a CPU a pool keeps the buffers and units keep their gradients, so a rank has from the
first step on what it ends up with. Rounds are run through with the runtime's own rules and its own pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from onefold.comm.buffers import Pool
from onefold.cost.limits import IN_FLIGHT, LEAVING
from onefold.cost.sizes import UnitSize
from onefold.cost.states import gradient_bytes, updated_numel
from onefold.settings.placement import Placement, Scope


class Held(NamedTuple):
    """What gradients take."""

    gradients: int = 0  # that wait for the update
    buffers: int = 0

    def at_most(self, other: Held) -> Held:
        return Held(*map(max, self, other))


class Arrival(NamedTuple):
    """The same while the gradients of one unit come."""

    before: Held = Held()
    filling: Held = Held()
    done: Held = Held()  # all are there: a round starts, and the oldest one ends
    fresh: int = 0  # bytes of the largest as autograd makes it, until it is copied
    after: Held = Held()  # of the last unit: backward is over, and the rounds that are left end


class ReductionInFlight(NamedTuple):
    """A reduction on the way."""

    unit: UnitSize
    placement: Placement
    lent: list[torch.Tensor]


class Rounds:
    """Reductions of one backward. Where gradients are `counted`, those that wait for the update are among what is held;
    where the host updates they stream through buffers, and `inside` backward they go with their update, for which as
    many may wait as have `room`."""

    def __init__(self, ranks: int, *, cuda: bool, inside: bool, counted: bool, room: int) -> None:
        self._pool = Pool(torch.device("meta"), keeps=not cuda)
        self._ranks, self._cuda, self._inside, self._counted = ranks, cuda, inside, counted
        self._waiting = 0  # bytes of gradients
        self._room, self._gone = room, 0  # bytes that may wait for the host, and that were ever to be had
        self._flight: deque[ReductionInFlight] = deque()
        self._leaving: deque[list[torch.Tensor]] = deque()  # on the way down
        self._most = Held()  # while rounds end

    @property
    def _held(self) -> Held:
        buffers = sum(buffer.numel() for buffer in self._pool.buffers())
        return Held(self._waiting, buffers + min(self._room, self._gone))

    def arrive(self, unit: UnitSize, placement: Placement) -> Arrival:
        """A unit's gradients come, and make a round."""
        before, lent = self._held, []
        if placement.updated_on_host or not self._in_place(unit, placement):
            lent.append(self._take(unit.whole, self._wire(unit)))
        else:
            self._wait_for_update(unit, placement)
        filling = self._most = self._held
        while len(self._flight) >= IN_FLIGHT:
            self._retire()
        others = self._ranks - 1
        lent.append(self._take(unit.shard * (min(others, 1) if self._cuda else others), self._wire(unit)))
        self._flight.append(ReductionInFlight(unit, placement, lent))
        fresh = 0 if self._unflattened(unit, placement) else unit.largest * unit.widths.compute
        return Arrival(before if unit.params == 1 else filling, filling, self._most.at_most(self._held), fresh)

    def drain(self) -> Held:
        """The fullest moment while the rounds that are left end."""
        self._most = self._held
        while self._flight:
            self._retire()
        return self._most

    def meanwhile(self) -> Arrival:
        """Of a unit that brings no gradients."""
        return Arrival(self._held, self._held, self._held)

    def next_step(self, waiting: int) -> None:
        """With bytes of gradients that other units left. What is on the way down stays until others follow it."""
        self._waiting, self._gone = waiting, 0

    def fill_room(self) -> None:
        """As many wait for the host as ever may."""
        self._gone = self._room

    def update(self, unit: UnitSize, placement: Placement) -> None:
        """What torch borrows where 16 bits compute."""
        numel = updated_numel(unit, placement)
        lent = [self._take(numel, 4) for _ in range(2 if unit.widths.master == 2 else 1)]
        for taken in lent:
            self._pool.give(taken)

    def _retire(self) -> None:
        unit, placement, lent = self._flight.popleft()
        in_place = self._in_place(unit, placement)
        if placement.updated_on_host:
            summed = unit.shard if placement.gradients is Scope.SHARDED else unit.whole
            self._leaving.append([lent.pop(0) if in_place else self._take(summed, unit.widths.grad)])
        elif not in_place:
            self._wait_for_update(unit, placement)
        if unit.widths.narrow and not self._unflattened(unit, placement):
            lent.append(self._take(unit.shard, 4))
        self._most = self._most.at_most(self._held)
        if self._inside:
            self._waiting -= self._counted * gradient_bytes(unit, placement)
        while len(self._leaving) > (LEAVING if self._cuda and not self._room else 0):
            lent += self._leaving.popleft()
            self._gone += lent[-1].nbytes
        for taken in lent:
            self._pool.give(taken)

    def _in_place(self, unit: UnitSize, placement: Placement) -> bool:
        """Whole gradients are summed where they stay."""
        whole = placement.gradients is Scope.REPLICATED
        return whole and (unit.widths.grad == self._wire(unit) or self._unflattened(unit, placement))

    def _unflattened(self, unit: UnitSize, placement: Placement) -> bool:
        """One rank leaves gradients as autograd makes them."""
        alone = self._cuda and self._ranks == 1 and not placement.updated_on_host
        return alone and unit.widths.narrow and unit.widths.grad == unit.widths.compute

    def _wire(self, unit: UnitSize) -> int:
        """Of one rank nothing travels, so nothing is widened for it."""
        return unit.widths.wire if self._ranks > 1 else min(unit.widths.wire, unit.widths.grad)

    def _wait_for_update(self, unit: UnitSize, placement: Placement) -> None:
        self._waiting += self._counted * gradient_bytes(unit, placement)

    def _take(self, numel: int, width: int) -> torch.Tensor:
        return self._pool.take(numel * width, torch.uint8)


def arrivals(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    ranks: int,
    *,
    cuda: bool,
    one_pass: bool,
    inside: bool = False,
    accumulates: bool = False,
    others: int = 0,
    room: int = 0,
) -> list[Arrival]:
    """Of each unit. On a CPU the buffers a rank ends up with, whichever unit computes. On CUDA with gradients, unless
    micro-batches add up and these stay; `others` are bytes of units that come before all of these in backward. `room`
    is for gradients that wait on the device for the host."""
    rows = list(zip(units, placements, strict=True))
    rounds = Rounds(ranks, cuda=cuda, inside=inside, counted=cuda and not accumulates, room=room)
    found: list[Arrival] = []
    for _ in range(2 if cuda and any(placement.updated_on_host for placement in placements) else 1):
        rounds.next_step(others)
        found = [rounds.arrive(*row) if row[0].trained else rounds.meanwhile() for row in reversed(rows)]
        end = rounds.drain()
    if cuda:
        found[-1:] = [last._replace(after=end) for last in found[-1:]]
        return found[::-1]
    for unit, placement in rows if not one_pass else ():
        if unit.trained and unit.widths.narrow and not placement.updated_on_host:
            rounds.update(unit, placement)
    rounds.fill_room()
    end = rounds.drain()
    return [Arrival(end, end, end)] * len(rows)
