"""Bytes in memory at each instant of a step, and so the peak.

Forward adds what each block keeps for backward; backward frees it again, and adds gradients. At every instant the block
that computes has its units unsharded, and the next ones are prefetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from onefold.cost.activations import ActivationBytes
from onefold.cost.arrivals import Arrival, GradientBytes
from onefold.cost.limits import BETWEEN_STEPS, WORKERS, reading_bytes, updating_bytes, waiting_bytes
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost, file_bytes, optimizer_bytes, updated_numel
from onefold.settings.placement import Placement, Scope, Tier


class Instant(NamedTuple):
    """Bytes at one instant of a step, beside those that are always in memory."""

    where: str
    gathered: int = 0
    gradients: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.gradients + self.buffers + self.activations


class Segment(NamedTuple):
    """A block, or a unit outside every block, while it computes."""

    where: str
    block: bool
    backward: bool
    head: bool  # after the last block
    gathered: int  # bytes of unsharded units: its own, and prefetched ones
    arrivals: tuple[Arrival, ...]  # of its units, in the order of forward
    tied: int = 0  # bytes of a gradient of tied embedding and head weights, which autograd keeps to sum both
    between: bool = False  # its bytes are halfway between its neighbours', so that it is never the fullest alone


def lent_bytes(units: Sequence[UnitSize], placements: Sequence[Placement]) -> int:
    """Bytes of gradients that may wait on the device for host updates in backward."""
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained and p.updated_on_host]
    return waiting_bytes([u.widths.grad * (u.numel if p.gradients is Scope.REPLICATED else u.shard) for u, p in rows])


class Staging(NamedTuple):
    """Bytes of staging buffers in host memory."""

    copied: int  # pinned on CUDA: sources and targets of transfers
    worked: int  # pageable: scratch of updates, and state read from files


def staging_bytes(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    cost: StateCost,
    *,
    in_backward: bool,
    prefetch: int = 1,
) -> Staging:
    """Staging buffers of the update threads, one unit each; a file that grows has two. One more unit may be read
    between steps. With updates `in_backward`, gradients wait on the device instead. Parameters that are kept in files
    are read for all-gathers, too."""
    rows = [(u, p) for u, p in zip(units, placements, strict=True) if u.trained and p.updated_on_host]
    in_files = [(u, p) for u, p in zip(units, placements, strict=True) if p.parameters_tier is Tier.DISK]
    read = reading_bytes([file_bytes(u.shard * u.widths.compute) for u, _ in in_files], prefetch)
    if not rows:
        return Staging(read, 0)
    copied = read + updating_bytes([u.shard * u.widths.compute for u, p in rows if p.parameters_tier is not Tier.HOST])
    if in_backward:
        copied += updating_bytes([u.shard * u.widths.grad for u, _ in rows])
    wide = [(2 if u.widths.master == 2 else 1) * 4 * updated_numel(u, p) for u, p in rows if u.widths.narrow]
    files = [optimizer_bytes(u, p, cost, Tier.DISK) for u, p in rows]
    return Staging(copied, WORKERS * max(wide, default=0) + (WORKERS + 1 + BETWEEN_STEPS) * max(files))


def segments(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    prefetch: int,
    arriving: Sequence[Arrival] = (),
    *,
    cuda: bool = True,
    tied: int | None = None,
    kept: Collection[int] = (),
) -> list[Segment]:
    """The segments of a forward, whose reverse is backward. The `tied` unit stays unsharded from the head to the end of
    backward, the `kept` ones from their forward to their backward."""
    runs = _runs(units)
    last_block = max((number for number, (block, _) in enumerate(runs) if block), default=len(runs))
    sharded = {i for i, placement in enumerate(placements) if placement.parameters is Scope.SHARDED}
    shared = units[tied].largest_numel * units[tied].widths.compute if tied is not None and units[tied].trained else 0
    found = []
    for backward in (False, True):
        order = [i for i in range(len(units)) if i in sharded]
        order = order[::-1] if backward else order
        place = {unit: number for number, unit in enumerate(order)}
        held = {i for i in kept if i in sharded} if backward else set[int]()  # unsharded before or until they compute
        for number, (block, run) in reversed(list(enumerate(runs))) if backward else enumerate(runs):
            own = [i for i in run if i in place]
            after = max((place[i] for i in own), default=-1) + 1
            before_any = backward and number > last_block  # the logits come first, which need no unit but the tied one
            ahead = order[after : after + prefetch] if own and not before_any else []
            gathered = sum(units[i].unsharded_bytes for i in {*own, *ahead, *held})
            held = held - {*own} if backward else held | {i for i in own if i in kept}
            if tied in sharded and tied not in {*run, *kept} and (backward or number > last_block):
                gathered += units[tied].unsharded_bytes
            where = f"{'backward' if backward else 'forward'} of {block or units[run[0]].name}"
            here = (
                tuple(_in_block(arriving[i], units[i], block) for i in run)
                if arriving and (backward or not cuda)
                else (Arrival(),)
            )
            waiting = shared * (3 if tied in run else 1) if backward else 0
            found.append(Segment(where, bool(block), backward, number > last_block, gathered, here, waiting))
    kinds, levels = [_kind(one) for one in found], [_levels(one) for one in found]
    inner = [
        one._replace(between=kinds[i - 1] == kinds[i] == kinds[i + 1] and _halfway(*levels[i - 1 : i + 2]))
        for i, one in enumerate(found[1:-1], 1)
    ]
    return [*found[:1], *inner, *found[-1:]] if len(found) > 1 else found


def _kind(one: Segment) -> tuple[Any, ...]:
    return one.block, one.backward, one.head, [(arrival.fresh, arrival.beside) for arrival in one.arrivals]


def _levels(one: Segment) -> list[int]:
    """All bytes of a segment that change from one to the next."""
    return [
        one.gathered,
        one.tied,
        *(n for a in one.arrivals for held in (a.before, a.filling, a.done, a.after) for n in held),
    ]


def _halfway(low: Sequence[int], middle: Sequence[int], high: Sequence[int]) -> bool:
    """Whether a segment's bytes, as those of activations, change by as much from the one before as to the one after."""
    return all(a + c == 2 * b for a, b, c in zip(low, middle, high, strict=True))


def _runs(units: Sequence[UnitSize]) -> list[tuple[str, list[int]]]:
    """Each block with its units, and "" with each unit outside every block, in the order of forward."""
    runs = dict[str, list[int]]()
    for index, unit in enumerate(units):
        for block in unit.blocks or (f"#{index}",):
            runs.setdefault(block, []).append(index)
    return [("" if block.startswith("#") else block, run) for block, run in runs.items()]


def _in_block(arrival: Arrival, unit: UnitSize, block: str) -> Arrival:
    """The bytes around the gradients of one block. A unit of several blocks is complete with its first one."""
    if len(unit.blocks) < 2:
        return arrival
    at, count = unit.blocks.index(block), len(unit.blocks)
    filling = GradientBytes(
        *(low + (high - low) * (count - at) // count for low, high in zip(arrival.before, arrival.filling, strict=True))
    )
    return arrival._replace(filling=filling, done=filling if at else arrival.done, beside=arrival.fresh)


def instants(
    step: Sequence[Segment], activations: ActivationBytes, in_flight: int = 1, *, every: bool = False
) -> Iterator[Instant]:
    """The instants that can be the fullest, or all (`every`); `in_flight` micro-batches are between forward and
    backward at once."""
    blocks = sum(segment.block and not segment.backward for segment in step)
    earlier = (in_flight - 1) * blocks * activations.kept_per_block
    kept, first = blocks if activations.arena else 0, True
    for where, block, backward, head, gathered, arriving, tied, between in step:
        kept += block and not (backward or activations.arena)
        if between and not every:
            kept -= block and backward and not activations.arena
            continue
        base = earlier + kept * activations.kept_per_block
        if block and backward and first:
            base, first = base + activations.first_backward, False
        for held, working in _instants_of(arriving, activations, block=block, head=head, tied=tied):
            yield Instant(where, gathered, *held, base + working)
        kept -= block and backward and not activations.arena
        left, more = earlier + kept * activations.kept_per_block, tied if block or head else arriving[0].fresh
        yield Instant(where, gathered, *arriving[0].done, left + activations.outside + more)
        yield Instant(where, 0, *arriving[0].after, left)


def _instants_of(
    arriving: Sequence[Arrival], activations: ActivationBytes, *, block: bool, head: bool, tied: int
) -> Iterator[tuple[GradientBytes, int]]:
    """Bytes of gradients at the instants of a segment's backward, and of what it computes with then. The first unit of
    a block is complete when the block's backward has ended, the others before."""
    for before, filling, _, fresh, beside, _ in arriving:
        if block:
            yield filling, activations.block + tied + max(activations.widest + beside * activations.arena, fresh)
        elif head:
            yield filling, activations.head
            yield filling, activations.logits + tied
        else:
            yield before, activations.outside + tied
            yield filling, activations.outside + fresh
    for arrival in arriving[1:]:
        yield arrival.done, activations.block + tied + arrival.fresh
