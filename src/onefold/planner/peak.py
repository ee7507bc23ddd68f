"""The fullest instant of a step: states and constant buffers all along, gathered units and activations as they come.

Forward adds what each block keeps; backward takes it away again. At every instant the block that computes has its
units whole, and the next ones are on their way. The pool of buffers is run through one backward and one update, with
the runtime's own rule of reuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from onefold.away import LEAVING, under_way_bytes, waiting_bytes
from onefold.jobs import AT_HAND, WORKERS
from onefold.memory import Pool
from onefold.placement import Placement, Scope, Tier
from onefold.planner.activations import ActivationBytes
from onefold.planner.sizes import UnitSize
from onefold.planner.states import StateCost, optimizer_bytes, updated_numel
from onefold.rounds import IN_FLIGHT


class Instant(NamedTuple):
    """What is in memory beside states and constant buffers."""

    where: str
    gathered: int
    activations: int


class Segment(NamedTuple):
    """A block, or a unit outside every block, while it computes."""

    where: str
    block: bool
    backward: bool
    gathered: int  # bytes of whole units: its own, and those on their way


def pool_bytes(
    units: Sequence[UnitSize], placements: Sequence[Placement], ranks: int, *, cuda: bool, one_pass: bool
) -> int:
    """The constant buffers a rank ends up with. Where the host updates, gradients stream through them; an update in one
    pass borrows none."""
    pool = Pool(torch.device("meta"))
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained]
    waiting = Pool(torch.device("meta"))  # for the host
    flight: deque[tuple[UnitSize, int, list[torch.Tensor]]] = deque()
    leaving: deque[list[torch.Tensor]] = deque()  # on the way down

    def take(numel: int, width: int) -> torch.Tensor:
        return pool.take(numel * width, torch.uint8)

    def retire() -> None:
        unit, summed, held = flight.popleft()
        leaving.append([waiting.take(summed * unit.widths.grad, torch.uint8)] if summed else [])
        if unit.widths.narrow:
            pool.give(take(unit.shard, 4))
        for taken in held:
            pool.give(taken)
        while len(leaving) > (LEAVING if cuda else 0):
            for taken in leaving.popleft():
                waiting.give(taken)

    for unit, placement in reversed(rows):
        held = []
        at_home = placement.gradients is Scope.WHOLE and unit.widths.grad == unit.widths.wire
        if not at_home or placement.away:
            held.append(take(unit.whole, unit.widths.wire))
        while len(flight) >= IN_FLIGHT:
            retire()
        held.append(take(unit.shard * ((ranks - 1) if not cuda else 1), unit.widths.wire))
        summed = unit.shard if placement.gradients is Scope.SHARD else unit.whole
        flight.append((unit, summed if placement.away and not at_home else 0, held))
    while flight:
        retire()
    for unit, placement in rows if not (cuda or one_pass) else ():
        if unit.widths.narrow and not placement.away:
            numel = updated_numel(unit, placement)
            lent = [take(numel, 4) for _ in range(2 if unit.widths.master == 2 else 1)]
            for taken in lent:
                pool.give(taken)
    return sum(buffer.numel() for buffer in [*pool.buffers(), *waiting.buffers()])


def lent_bytes(units: Sequence[UnitSize], placements: Sequence[Placement]) -> int:
    """Gradients that may wait on the device for the host, where it updates inside backward."""
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained and p.away]
    return waiting_bytes([u.widths.grad * (u.whole if p.gradients is Scope.WHOLE else u.shard) for u, p in rows])


class Staging(NamedTuple):
    """Buffers in host memory beside states."""

    copied: int  # pinned on CUDA: what is between device or disk and an update
    worked: int  # pageable: what an update works in


def staging_bytes(
    units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost, *, inside: bool
) -> Staging:
    """As the update threads have them, a unit each; a file that grows has two. One more may be read between steps.
    `inside` backward gradients wait on the device."""
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained and p.away]
    if not rows:
        return Staging(0, 0)
    copied = under_way_bytes([u.shard * u.widths.compute for u, p in rows if p.parameters_tier is not Tier.HOST])
    if inside:
        copied += under_way_bytes([u.shard * u.widths.grad for u, _ in rows])
    wide = [(2 if u.widths.master == 2 else 1) * 4 * updated_numel(u, p) for u, p in rows if u.widths.narrow]
    files = [optimizer_bytes(u, p, cost, Tier.DISK) for u, p in rows]
    return Staging(copied, WORKERS * max(wide, default=0) + (WORKERS + 1 + AT_HAND) * max(files))


def segments(
    units: Sequence[UnitSize], placements: Sequence[Placement], prefetch: int, tied: int | None = None
) -> list[Segment]:
    """A forward and a backward. What stands behind the last block has the `tied` unit whole too."""
    runs = [list(run) for _, run in groupby(range(len(units)), key=lambda i: units[i].block or f"#{i}")]
    last_block = max((number for number, run in enumerate(runs) if units[run[0]].block), default=len(runs))
    sharded = {i for i, placement in enumerate(placements) if placement.parameters is Scope.SHARD}
    found = []
    for backward in (False, True):
        order = [i for i in range(len(units)) if i in sharded]
        order = order[::-1] if backward else order
        place = {unit: number for number, unit in enumerate(order)}
        for number, run in reversed(list(enumerate(runs))) if backward else enumerate(runs):
            own = [i for i in run if i in place]
            after = max((place[i] for i in own), default=-1) + 1
            ahead = order[after : after + prefetch] if own else []
            gathered = sum(units[i].whole_bytes for i in [*own, *ahead])
            if tied in sharded and tied not in run and number > last_block:
                gathered += units[tied].whole_bytes
            name = units[run[0]].block or units[run[0]].name
            where = f"{'backward' if backward else 'forward'} of {name}"
            found.append(Segment(where, bool(units[run[0]].block), backward, gathered))
    return found


def instants(walk: Sequence[Segment], activations: ActivationBytes, flying: int = 1) -> Iterator[Instant]:
    """Those that can be the fullest; `flying` micro-batches are between forward and backward at once."""
    blocks = sum(segment.block and not segment.backward for segment in walk)
    earlier = (flying - 1) * blocks * activations.kept_per_block
    kept = 0
    for segment in walk:
        kept += segment.block and not segment.backward
        working = activations.block if segment.block else activations.head
        yield Instant(segment.where, segment.gathered, earlier + kept * activations.kept_per_block + working)
        kept -= segment.block and segment.backward
