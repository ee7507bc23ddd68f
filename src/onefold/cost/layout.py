"""Which parameters share a unit, and which elements of it each rank owns. Integers only; no tensors, no processes.

1 A model's parameters, in registration order, are cut into units: by block (neighbouring blocks that are small share
  units), by kind (dtype and trainability), and by `bucket_bytes`. The stage plays no part, so all stages move and
  update the same units.
2 Inside a unit every parameter starts on a multiple of ALIGN, padding behind it. So any run of parameters is a
  slice that starts and ends on a full vector, however the optimizer groups them.
3 A unit is cut into N equal shards, each a multiple of ALIGN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from onefold.settings.values import SHARED_BYTES

ALIGN = 64  # elements: every element goes through the same vector code at every stage and at every N


class Span(NamedTuple):
    """Half-open range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def clip(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)


def padded(numel: int, to: int = ALIGN) -> int:
    return -(-numel // to) * to


def part_numel(numel: int, ranks: int) -> int:
    """Elements that each of `ranks` keeps of a tensor partitioned among them: equal multiples of ALIGN."""
    return padded(numel, ALIGN * ranks) // ranks


class ParamInfo(NamedTuple):
    """What the layout needs of one parameter."""

    name: str
    numel: int
    itemsize: int
    kind: str  # dtype, and whether it is trained: one unit holds one kind
    block: str = ""  # the block it belongs to; "" outside every block


class Slot(NamedTuple):
    """The place of one parameter in its unit's flat buffer."""

    name: str
    numel: int
    start: int

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.numel)

    @property
    def padded_span(self) -> Span:
        return Span(self.start, self.start + padded(self.numel))


class Piece(NamedTuple):
    """A run of one parameter's elements that one rank owns."""

    name: str
    elements: Span  # in the parameter, flattened
    offset: int  # in the owner's shard


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit: parameters one after the other in a flat buffer of `ranks` equal shards."""

    name: str
    kind: str
    itemsize: int
    slots: tuple[Slot, ...]
    ranks: int
    replicas: int = 1  # a shard divides into so many equal parts, which replicas reduce-scatter

    @cached_property
    def used_numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def body(self) -> Span:
        """All parameters and the padding between them, without the padding at the end that makes N equal shards."""
        return Span(0, self.slots[-1].padded_span.stop if self.slots else 0)

    @cached_property
    def shard_numel(self) -> int:
        granule = ALIGN * self.replicas
        return max(padded(self.body.stop, granule * self.ranks) // self.ranks, granule)

    @property
    def numel(self) -> int:
        return self.shard_numel * self.ranks

    def shard(self, rank: int) -> Span:
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The padding, which is always zero."""
        ends = [slot.span.stop for slot in self.slots]
        starts = [slot.start for slot in self.slots[1:]] + [self.numel]
        return tuple(Span(a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The elements of each parameter in the shard of `rank`, in order."""
        mine = self.shard(rank)
        for slot in self.slots:
            part = slot.span.clip(mine)
            if part.numel:
                yield Piece(slot.name, part.shift(-slot.start), part.start - mine.start)


class _Run(NamedTuple):
    """Neighbouring parameters that may share units: of one block, of several small blocks, or outside every block."""

    blocks: list[str]  # [""] outside every block
    params: list[ParamInfo]


def plan_units(
    params: Sequence[ParamInfo], ranks: int, bucket_bytes: int, replicas: int = 1, *, shared_bytes: int | None = None
) -> list[UnitLayout]:
    """Groups parameters, given in registration order, into units.

    A run of neighbours of one block (or outside every block) is first parted by kind, then filled up to
    `bucket_bytes` (outside blocks 32 MiB at most); a parameter that large stands alone. Inside a block, whose units are
    used together, the small ones on either side of it share a unit. Neighbouring blocks of one container are one run
    while they are at most `shared_bytes` together (`bucket_bytes` where that is None or more; 0: each block has units
    of its own).
    """
    share = bucket_bytes if shared_bytes is None else min(shared_bytes, bucket_bytes)
    fills: list[tuple[list[str], str, list[ParamInfo]]] = []
    for blocks, members in _runs(params, share):
        for kind in dict.fromkeys(p.kind for p in members):
            alike = [p for p in members if p.kind == kind]
            inside = blocks != [""]
            limit = bucket_bytes if inside else min(bucket_bytes, SHARED_BYTES)
            fills += [(blocks, kind, fill) for fill in _fill(alike, limit, across=inside)]
    per_block = Counter(blocks[0] for blocks, _, _ in fills)
    units = []
    for blocks, kind, fill in fills:
        first = fill[0].name  # unique: a parameter is in one unit
        name = first if len(fill) == 1 else f"{first}…"
        if blocks != [""] and per_block[blocks[0]] == 1:
            name = blocks[0] if len(blocks) == 1 else f"{blocks[0]}…{blocks[-1].rpartition('.')[2]}"
        units.append(_lay(name, kind, fill, ranks, replicas))
    return units


def _runs(params: Sequence[ParamInfo], share: int) -> list[_Run]:
    """Neighbours of one block, or outside every block; blocks of one container that follow one another are joined."""
    each = [_Run([block], list(run)) for block, run in groupby(params, key=lambda p: p.block)]
    runs: list[_Run] = []
    for container, neighbours in groupby(each, key=lambda run: _container(run.blocks[0])):
        found = list(neighbours)
        runs += found if container is None or not share else _joined(found, share)
    return runs


def _joined(blocks: list[_Run], share: int) -> list[_Run]:
    """Blocks joined into as few runs as `share` bytes allow, and these as equal as can be: equal units share buffers,
    and the last one is not much shorter than the others."""
    sizes = [sum(padded(p.numel) * p.itemsize for p in block.params) for block in blocks]
    fewest, low, high = len(_starts(sizes, share)), 0, share
    while low < high:  # the smallest limit that makes no more
        middle = (low + high) // 2
        low, high = (low, middle) if len(_starts(sizes, middle)) == fewest else (middle + 1, high)
    starts = _starts(sizes, high)
    runs = (blocks[start:stop] for start, stop in zip(starts, [*starts[1:], len(blocks)]))
    return [_Run([name for one in run for name in one.blocks], [p for one in run for p in one.params]) for run in runs]


def _starts(sizes: Sequence[int], limit: int) -> list[int]:
    """Where runs start, if blocks of these bytes are joined from the first on and each run is as long as `limit`
    allows.

    >>> _starts([5, 5, 5, 20, 5], 10)
    [0, 2, 3, 4]
    """
    starts: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if not starts or filled > limit:
            starts.append(index)
            filled = size
    return starts


def blocks_of(params: Iterable[ParamInfo]) -> tuple[str, ...]:
    """The blocks that parameters belong to, in order."""
    return tuple(dict.fromkeys(param.block for param in params if param.block))


def _container(block: str) -> str | None:
    """The name of the module that holds a block; None outside every block.

    >>> _container("decoder.layers.3")
    'decoder.layers'
    """
    return block.rpartition(".")[0] if block else None


def _fill(params: Sequence[ParamInfo], bucket_bytes: int, *, across: bool) -> list[list[ParamInfo]]:
    """Groups of parameters, in the order of their first ones. Small parameters share a unit also `across` large ones
    between them, or with neighbours only."""
    fills: list[list[ParamInfo]] = []
    fill: list[ParamInfo] = []  # that small ones go into
    filled = 0
    for param in params:
        size = padded(param.numel) * param.itemsize
        if size >= bucket_bytes:
            fills.append([param])
            fill = fill if across else []
            continue
        if not fill or filled + size > bucket_bytes:
            fill, filled = [], 0
            fills.append(fill)
        fill.append(param)
        filled += size
    return fills


def _lay(name: str, kind: str, params: Sequence[ParamInfo], ranks: int, replicas: int) -> UnitLayout:
    slots, start = [], 0
    for param in params:
        slots.append(Slot(param.name, param.numel, start))
        start += padded(param.numel)
    return UnitLayout(
        name=name, kind=kind, itemsize=params[0].itemsize, slots=tuple(slots), ranks=ranks, replicas=replicas
    )


class Move(NamedTuple):
    """Copy `numel` elements from one rank's shard of an old unit to a rank's shard of a new unit."""

    old_unit: str
    old_rank: int
    old_offset: int
    new_unit: str
    new_rank: int
    new_offset: int
    numel: int


def reshard(old: Sequence[UnitLayout], new: Sequence[UnitLayout]) -> Iterator[Move]:
    """The copies that bring the same parameters from one layout to another, of other units or another number of
    ranks."""
    sources: dict[str, list[tuple[str, int, Piece]]] = {}
    for unit, rank in ((u, r) for u in old for r in range(u.ranks)):
        for piece in unit.pieces(rank):
            sources.setdefault(piece.name, []).append((unit.name, rank, piece))
    for unit, rank in ((u, r) for u in new for r in range(u.ranks)):
        for piece in unit.pieces(rank):
            for old_unit, old_rank, source in sources.get(piece.name, ()):
                common = source.elements.clip(piece.elements)
                if common.numel:
                    yield Move(
                        old_unit=old_unit,
                        old_rank=old_rank,
                        old_offset=source.offset + common.start - source.elements.start,
                        new_unit=unit.name,
                        new_rank=rank,
                        new_offset=piece.offset + common.start - piece.elements.start,
                        numel=common.numel,
                    )
