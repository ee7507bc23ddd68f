"""What one rank sends in a step, by purpose: elements, bytes and calls. The runtime's own reports use this too.

(N-1)/N of a unit travels each time it is reduced or gathered. Gradients that are whole are reduced once per step,
however many micro-batches it has; those that are sharded once per micro-batch. Parameters that are sharded are gathered
for every forward and every backward; the unit that a forward ends with stays for the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onefold.cost.sizes import Sizes, UnitSize
from onefold.settings.placement import Placement, Scope


class Sent(NamedTuple):
    """What one rank sends to the others."""

    elements: int
    bytes: int
    calls: int
    collective: str
    axis: str = "shard"


def once(units: Iterable[UnitSize], width: str, ranks: int, collective: str) -> Sent:
    """Every unit moved once."""
    units = list(units)
    elements = sum(unit.shard for unit in units) * (ranks - 1)
    sent_bytes = sum(unit.shard * getattr(unit.widths, width) for unit in units) * (ranks - 1)
    return Sent(elements, sent_bytes, len(units), collective)


def times(sent: Sent, count: int) -> Sent:
    return sent._replace(elements=sent.elements * count, bytes=sent.bytes * count, calls=sent.calls * count)


def reduce_default(placement: Placement) -> str:
    """How gradients accumulate unless told otherwise: whole ones locally, sharded ones over ranks each time."""
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
    """By purpose; `forward` and `backward` are the units gathered in each pass."""
    n, units = sizes.ranks, sizes.units
    trained = [(unit, placement) for unit, placement in zip(units, placements, strict=True) if unit.trained]
    rounds = micro_batches if (reduce or reduce_default(placements[0])) == "each" else 1
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
    everyone = n * replicas
    flags = (sizes.flags + len(trained)) * (everyone - 1)
    sent["used-flags"] = Sent(0, flags, 1, "all-gather", "all")
    if clip:
        sent["norm"] = Sent(0, 8 * len(trained) * (n - 1), 1, "all-gather")
    return sent


def total(sent: dict[str, Sent]) -> tuple[int, int]:
    """Elements of training state, and all bytes."""
    return sum(row.elements for row in sent.values()), sum(row.bytes for row in sent.values())
