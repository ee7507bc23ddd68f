"""What one rank sends in a step, by purpose: elements, bytes and calls. The runtime's own reports use this too.

A rank sends (N-1)/N of a unit's elements each time the unit is reduce-scattered or all-gathered; how many bytes an
element of a reduce-scatter has depends on how ranks sum (comm/strategy.py). Replicated gradients are reduced
once per step, however many micro-batches it has; sharded ones once per micro-batch. Sharded parameters are all-gathered
for every forward and every backward; the last unit of forward stays unsharded for backward. What ranks agree on beside
that does not grow with ranks times parameters: the flags of used parameters are one all-reduce, the norm one number of
each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onefold.comm.strategy import Strategy, max_rounds
from onefold.cost.sizes import Sizes, UnitSize
from onefold.settings.placement import Placement, Scope

DIGEST_BYTES = 16  # of what users must do alike on all ranks: beside the flags of used parameters
SAID_BYTES = DIGEST_BYTES + 1  # the digest, and a flag for inputs that were longer than all before
DIRECTION_BYTES = 2  # of an element: Newton-Schulz runs in bf16
NORM_BYTES = 8  # one float64: the norm of all gradients that a rank holds


class Sent(NamedTuple):
    """What one rank sends to its peers."""

    elements: int
    bytes: int
    calls: int
    collective: str
    axis: str = "shard"
    messages: int = 0  # to single peers, as many as latencies of rings
    near_bytes: int = 0  # of the bytes, those that an all-to-all sends inside a node


def gathered_once(units: Iterable[UnitSize], width: str, ranks: int) -> Sent:
    """What one rank sends to all-gather every unit once."""
    units = list(units)
    elements = sum(unit.shard for unit in units) * (ranks - 1)
    sent_bytes = sum(unit.shard * getattr(unit.widths, width) for unit in units) * (ranks - 1)
    return Sent(elements, sent_bytes, len(units), "all-gather", messages=len(units) * (ranks - 1))


def reduced_once(units: Sequence[UnitSize], strategy: Strategy) -> Sent:
    """What one rank sends to reduce-scatter every unit once."""
    alike = Counter((unit.shard, unit.widths.wire) for unit in units)  # of hundreds of units few sizes differ
    return Sent(
        elements=sum(unit.shard for unit in units) * (strategy.ranks - 1),
        bytes=sum(count * strategy.sent_bytes(*size) for size, count in alike.items()),
        calls=len(units),
        collective="reduce-scatter",
        messages=sum(count * strategy.messages(wire) for (_, wire), count in alike.items()),
        near_bytes=sum(count * strategy.near_bytes(*size) for size, count in alike.items()),
    )


def to_owners(units: Sequence[UnitSize], ranks: int, tp: int = 1) -> dict[str, Sent]:
    """What one rank sends in a step to the owners of matrices that Muon updates and, as an owner, to others, if all
    ranks own and hold equal parts of each matrix: `ranks` share a unit, and the matrices are split over `tp`."""
    owners = ranks * tp
    away = [(unit.whole_numel * (owners - 1) // (owners * ranks), unit.widths.grad) for unit in units]
    rounds, elements = -(-sum(unit.whole_count for unit in units) // owners), sum(numel for numel, _ in away)
    axis, messages = "tp" if ranks == 1 else "shard", rounds * (owners - 1)

    def sent(nbytes: int) -> Sent:
        return Sent(elements, nbytes, rounds, "all-to-all", axis, messages)

    gradients = sum(numel * width for numel, width in away)
    return {"whole-gradient": sent(gradients), "whole-direction": sent(elements * DIRECTION_BYTES)}


def times(sent: Sent, count: int) -> Sent:
    return sent._replace(
        elements=sent.elements * count,
        bytes=sent.bytes * count,
        calls=sent.calls * count,
        messages=sent.messages * count,
        near_bytes=sent.near_bytes * count,
    )


def reduce_default(placement: Placement) -> str:
    """The default of accumulate(reduce=): "once" for replicated gradients, "each" for sharded ones."""
    return "once" if placement.gradients is Scope.REPLICATED else "each"


def step_traffic(
    sizes: Sizes,
    placements: Sequence[Placement],
    *,
    strategy: Strategy,
    forward: Sequence[int],
    backward: Sequence[int],
    micro_batches: int = 1,
    reduce: str | None = None,
    replicas: int = 1,
    clip: bool = False,
    whole: bool = False,
    tp: int = 1,
) -> dict[str, Sent]:
    """What one rank sends in a step, by purpose; `forward` and `backward` list the units that are unsharded in each,
    `strategy` is how the ranks that share the states sum gradients; `whole`: matrices, which are split over `tp`, are
    updated by their owners."""
    n, units = sizes.ranks, sizes.units
    trained = [(unit, placement) for unit, placement in zip(units, placements, strict=True) if unit.trained]
    rounds = micro_batches if (reduce or (placements and reduce_default(placements[0]))) == "each" else 1
    sent = {"reduce": times(reduced_once([unit for unit, _ in trained], strategy), rounds)}
    kept = [unit for unit, placement in trained if placement.parameters is Scope.REPLICATED]
    if kept and trained[0][1].optimizer is Scope.SHARDED:
        sent["gather-updated"] = gathered_once(kept, "compute", n)
    elif kept:
        sent["gather-gradient"] = gathered_once(kept, "grad", n)
    if whole and n * tp > 1:
        sharded = [row for row in trained if row[1].optimizer is Scope.SHARDED]
        if sharded or tp > 1:  # where the optimizer is replicated, tp ranks hold parts of a tensor
            shared = [unit for unit, _ in sharded or trained]
            sent |= to_owners(shared, n if sharded else 1, tp)
    for purpose, order in (("gather-forward", forward), ("gather-backward", backward)):
        if order:
            sent[purpose] = times(gathered_once((units[i] for i in order), "compute", n), micro_batches)
    if replicas > 1:
        others, calls = replicas - 1, 2 * len(trained)
        moved = sum(2 * (unit.shard // replicas) * others for unit, _ in trained)
        moved_bytes = sum(2 * unit.shard * max(4, unit.widths.compute) // replicas * others for unit, _ in trained)
        across = Sent(moved, moved_bytes, calls, "all-reduce", "replica", calls * others)
        sent["reduce-replica"] = times(across, rounds)
    if not trained:  # nothing is reduced, agreed on or clipped
        return {purpose: row for purpose, row in sent.items() if purpose.startswith("gather-")}
    flags = (sizes.flags + len(trained) + SAID_BYTES) * max_rounds(n * replicas)
    sent["used-flags"] = Sent(0, flags, 1, "all-reduce", "all")
    if clip:
        sent["norm"] = Sent(0, NORM_BYTES * (n - 1), 1, "all-gather")
    return sent


def total(sent: dict[str, Sent]) -> tuple[int, int]:
    """The elements of training state that are sent, and the bytes of all messages."""
    return sum(row.elements for row in sent.values()), sum(row.bytes for row in sent.values())
