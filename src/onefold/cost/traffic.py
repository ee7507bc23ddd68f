"""What one rank sends in a step, by purpose: elements, bytes and calls. The runtime's own reports use this too.

A rank sends (N-1)/N of a unit each time the unit is reduce-scattered or all-gathered. Replicated gradients are reduced
once per step, however many micro-batches it has; sharded ones once per micro-batch. Sharded parameters are all-gathered
for every forward and every backward; the last unit of forward stays unsharded for backward. What ranks agree on beside
that does not grow with ranks times parameters: the flags of used parameters are one all-reduce, the norm one number of
each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onefold.comm.maximum import max_rounds
from onefold.cost.sizes import Sizes, UnitSize
from onefold.settings.placement import Placement, Scope

DIGEST_BYTES = 16  # of what users must do alike on all ranks: beside the flags of used parameters
NORM_BYTES = 8  # one float64: the norm of all gradients that a rank holds


class Sent(NamedTuple):
    """What one rank sends to its peers."""

    elements: int
    bytes: int
    calls: int
    collective: str
    axis: str = "shard"


def once(units: Iterable[UnitSize], width: str, ranks: int, collective: str) -> Sent:
    """What one rank sends to reduce-scatter or all-gather every unit once."""
    units = list(units)
    elements = sum(unit.shard for unit in units) * (ranks - 1)
    sent_bytes = sum(unit.shard * getattr(unit.widths, width) for unit in units) * (ranks - 1)
    return Sent(elements, sent_bytes, len(units), collective)


def times(sent: Sent, count: int) -> Sent:
    return sent._replace(elements=sent.elements * count, bytes=sent.bytes * count, calls=sent.calls * count)


def reduce_default(placement: Placement) -> str:
    """The default of accumulate(reduce=): "once" for replicated gradients, "each" for sharded ones."""
    return "once" if placement.gradients is Scope.REPLICATED else "each"


def step_traffic(
    sizes: Sizes,
    placements: Sequence[Placement],
    *,
    forward: Sequence[int],
    backward: Sequence[int],
    micro_batches: int = 1,
    reduce: str | None = None,
    replicas: int = 1,
    clip: bool = False,
) -> dict[str, Sent]:
    """What one rank sends in a step, by purpose; `forward` and `backward` list the units that are unsharded in each."""
    n, units = sizes.ranks, sizes.units
    trained = [(unit, placement) for unit, placement in zip(units, placements, strict=True) if unit.trained]
    rounds = micro_batches if (reduce or (placements and reduce_default(placements[0]))) == "each" else 1
    sent = {"reduce": times(once((u for u, _ in trained), "wire", n, "reduce-scatter"), rounds)}
    kept = [unit for unit, placement in trained if placement.parameters is Scope.REPLICATED]
    if kept and trained[0][1].optimizer is Scope.SHARDED:
        sent["gather-updated"] = once(kept, "compute", n, "all-gather")
    elif kept:
        sent["gather-gradient"] = once(kept, "grad", n, "all-gather")
    for purpose, order in (("gather-forward", forward), ("gather-backward", backward)):
        if order:
            sent[purpose] = times(once((units[i] for i in order), "compute", n, "all-gather"), micro_batches)
    if replicas > 1:
        moved = sum(2 * (unit.shard // replicas) * (replicas - 1) for unit, _ in trained)
        moved_bytes = sum(
            2 * unit.shard * max(4, unit.widths.compute) // replicas * (replicas - 1) for unit, _ in trained
        )
        sent["reduce-replica"] = times(Sent(moved, moved_bytes, 2 * len(trained), "all-reduce", "replica"), rounds)
    if not trained:  # nothing is reduced, agreed on or clipped
        return {purpose: row for purpose, row in sent.items() if purpose.startswith("gather-")}
    flags = (sizes.flags + len(trained) + DIGEST_BYTES) * max_rounds(n * replicas)
    sent["used-flags"] = Sent(0, flags, 1, "all-reduce", "all")
    if clip:
        sent["norm"] = Sent(0, NORM_BYTES * (n - 1), 1, "all-gather")
    return sent


def total(sent: dict[str, Sent]) -> tuple[int, int]:
    """The elements of training state that are sent, and the bytes of all messages."""
    return sum(row.elements for row in sent.values()), sum(row.bytes for row in sent.values())
