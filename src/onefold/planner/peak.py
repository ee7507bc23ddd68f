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

from onefold.memory import Pool
from onefold.placement import Placement, Scope
from onefold.planner.activations import ActivationBytes
from onefold.planner.sizes import UnitSize
from onefold.planner.states import updated_numel

IN_FLIGHT = 2  # reductions at once, as in rounds.py


class Instant(NamedTuple):
    """What is in memory beside states and constant buffers."""

    where: str
    gathered: int
    activations: int


def pool_bytes(units: Sequence[UnitSize], placements: Sequence[Placement], ranks: int, *, cuda: bool) -> int:
    """The constant buffers a rank ends up with."""
    pool = Pool(torch.device("meta"))
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained]
    flight: deque[list[torch.Tensor]] = deque()

    def take(numel: int, width: int) -> torch.Tensor:
        return pool.take(numel * width, torch.uint8)

    def retire() -> None:
        for taken in flight.popleft():
            pool.give(taken)

    for unit, placement in reversed(rows):
        held = []
        at_home = placement.gradients is Scope.WHOLE and unit.widths.grad == unit.widths.wire
        if not at_home:
            held.append(take(unit.whole, unit.widths.wire))
        while len(flight) >= IN_FLIGHT:
            if unit.widths.narrow:
                pool.give(take(unit.shard, 4))
            retire()
        held.append(take(unit.shard * ((ranks - 1) if not cuda else 1), unit.widths.wire))
        flight.append(held)
    while flight:
        retire()
    for unit, placement in rows if not cuda else ():
        if unit.widths.narrow:
            numel = updated_numel(unit, placement)
            lent = [take(numel, 4) for _ in range(2 if unit.widths.master == 2 else 1)]
            for taken in lent:
                pool.give(taken)
    return sum(buffer.numel() for buffer in pool.buffers())


def instants(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    activations: ActivationBytes,
    prefetch: int,
    flying: int = 1,
    tied: int | None = None,
) -> Iterator[Instant]:
    """Those that can be the fullest; `flying` micro-batches are between forward and backward at once. What stands
    behind the last block has the `tied` unit whole too."""
    segments = [list(run) for _, run in groupby(range(len(units)), key=lambda i: units[i].block or f"#{i}")]
    sharded = [i for i, placement in enumerate(placements) if placement.parameters is Scope.SHARD]
    blocks = [segment for segment in segments if units[segment[0]].block]
    earlier = (flying - 1) * len(blocks) * activations.kept_per_block
    for backward in (False, True):
        kept = len(blocks) if backward else 0
        for segment in reversed(segments) if backward else segments:
            block = bool(units[segment[0]].block)
            gathered = _live(units, sharded[::-1] if backward else sharded, segment, prefetch)
            if tied in sharded and tied not in segment and blocks and segment > blocks[-1]:
                gathered += units[tied].whole_bytes
            kept += block and not backward
            alive = earlier + kept * activations.kept_per_block
            working = activations.block if block else activations.head
            yield Instant(
                f"{'backward' if backward else 'forward'} of {units[segment[0]].block or units[segment[0]].name}",
                gathered,
                alive + working,
            )
            kept -= block and backward


def _live(units: Sequence[UnitSize], order: Sequence[int], segment: Sequence[int], prefetch: int) -> int:
    """Bytes of whole units while a segment computes: its own, and those on their way."""
    own = [i for i in order if i in segment]
    if not own:
        return 0
    after = order.index(own[-1]) + 1
    return sum(units[i].whole_bytes for i in [*own, *order[after : after + prefetch]])
