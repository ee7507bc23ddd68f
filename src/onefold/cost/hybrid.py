"""When replicas of a sharded model (a hybrid mesh) are faster than sharding over all ranks. Numbers only.

A reduce-scatter or all-gather over N ranks is a ring: N - 1 messages, one after the other, each with 1/N of the unit.
It takes N - 1 latencies, and (N-1)/N of the unit's bytes at the rate of the link. The bytes hardly grow with N; the
latencies do, while each message shrinks: of a unit of 32 MiB, 511 messages of 64 KiB at 512 ranks.

Where 16-bit gradients are summed by node (comm/strategy.py), a reduce-scatter is L - 1 messages inside a node of L
ranks and F - 1 between F nodes.

Sharded over S of N = R × S ranks, each all-gather of a unit is S - 1 messages, and gradients are then summed over the R
replicas in 2(R-1) more. At stage 3 fp32 takes 3(S-1) + 2(R-1) latencies for a unit in a step, not 3(N-1): 315 and not
12285 at 64 × 64 ranks; 16 bits on nodes of 8 take 266 and not 8708. The price is memory: 1/S of the states on each
rank, not 1/N. So the largest shard axis is proposed among those whose messages take about the least time, and only
where the states fit.

Latency and rates are those of the hardware the plan is for. The seconds are an upper bound: a message between two ranks
of one node may be faster, and a library may use trees. The plan's own seconds of a step have one latency for each
collective, and are a lower one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onefold.cost.estimate import Estimate
from onefold.cost.search import Question, fits, largest_batch, within_global_batch
from onefold.cost.text import format_bytes
from onefold.cost.work import Grid

FLAT = 256  # ranks up to which one axis is kept: latencies are a few milliseconds a unit, and compute hides them
WIDEST = 256  # the most ranks of a shard axis that is proposed
ABOUT = 1.25  # times the least seconds of messages: among these the axis that needs the least memory is taken
SAVED = 0.25  # of the messages' seconds that another mesh must save
NOTICED = 0.05  # messages that take less than so much of the compute are left as they are
BATCH = 0.9  # of the batch that must still fit


@dataclass(frozen=True)
class HybridMesh:
    """A mesh that takes less time for messages than sharding over all ranks, and the reason in one line."""

    replica: int
    shard: int
    batch: int  # sequences or rows of one micro-batch of one rank
    message_bytes: int  # of the largest unit, between two ranks
    flat_s: float  # seconds of messages in a step, hidden or not, sharded over all ranks
    messages_s: float  # and on this mesh
    peak_bytes: int
    reason: str


def ring_seconds(estimate: Estimate) -> tuple[float, float]:
    """Seconds that a step's messages of training state take, hidden or not: latencies, and bytes over links."""
    state = [sent for sent in estimate.messages.traffic.values() if sent.axis in ("shard", "replica") and sent.elements]
    latency = sum(sent.messages for sent in state) * estimate.hardware.latency_s
    return latency, sum(map(estimate.messages.moving_s, state))


def propose(question: Question, flat: Estimate) -> HybridMesh | None:
    """A hybrid mesh for this choice, if it saves a good part of the messages' time and fits; None where sharding over
    all ranks does as well, or was not asked for."""
    latency, moving = ring_seconds(flat)
    compute = flat.time.compute_s * flat.micro_batches
    if flat.grid.replica > 1 or flat.grid.shard <= FLAT or latency + moving <= NOTICED * compute:
        return None
    priced = [found for grid in _grids(flat) if (found := _at(question, flat, grid)) is not None]
    seconds = {found.grid: sum(ring_seconds(found)) for found in priced}
    near = [found for found in priced if seconds[found.grid] <= ABOUT * min(seconds.values())]
    best = max(near, key=lambda found: found.grid.shard, default=None)
    if best is None or seconds[best.grid] > (1 - SAVED) * (latency + moving):
        return None
    return _told(flat, best, latency, moving)


def _grids(flat: Estimate) -> Iterator[Grid]:
    """Whole nodes of ranks, doubled, which divide the ranks that share the states."""
    shard = max(2, flat.hardware.node_ranks // flat.grid.tp)
    while shard <= min(WIDEST, flat.grid.shard // 2):
        if flat.grid.shard % shard == 0:
            yield flat.grid._replace(shard=shard, replica=flat.grid.shard // shard)
        shard *= 2


def _at(question: Question, flat: Estimate, grid: Grid) -> Estimate | None:
    """The same choice over another grid, if it fits at about the same batch."""
    batch = flat.batch
    if question.batch is None and question.work.knows_activations:
        batch = min(batch, largest_batch(question, flat.choice, grid))
    if batch < BATCH * flat.batch:
        return None
    found = question.price(flat.choice, grid, batch)
    return found if fits(found) and within_global_batch(question, found) else None


def _told(flat: Estimate, best: Estimate, latency: float, moving: float) -> HybridMesh:
    unit = max(flat.sizes.units, key=lambda unit: unit.unsharded_bytes)
    cut, whole = unit.shard * unit.widths.compute, latency + moving
    messages = sum(ring_seconds(best))
    batch = f" at batch {best.batch}" if best.batch != flat.batch else ""
    reason = (
        f"sharded over {flat.grid.shard} ranks, a unit of {format_bytes(unit.unsharded_bytes)} travels in messages of "
        f"{format_bytes(cut)}, which in rings take up to {whole:.2g} s of a step, {latency / whole:.0%} of it "
        f"latency; on this mesh they take up to {messages:.2g} s, and {format_bytes(best.peak_bytes)} of "
        f"{format_bytes(best.hardware.memory_bytes)} still fit{batch}"
    )
    return HybridMesh(best.grid.replica, best.grid.shard, best.batch, cut, whole, messages, best.peak_bytes, reason)
