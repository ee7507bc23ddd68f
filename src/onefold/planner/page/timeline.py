"""What is in a device's memory over the time of a step, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from onefold.cost.estimate import Estimate
from onefold.cost.peak import Instant, instants

MOST = 200  # moments of a chart: of more, the fullest of each group is kept
OUTSIDE = 0.5  # of a block's time: what a unit outside every block takes, an embedding or the logits


@dataclass(frozen=True)
class Moment:
    """Bytes in memory from `start_s` until the next moment, by what they are."""

    start_s: float
    where: str
    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.gathered + self.buffers + self.activations


@dataclass(frozen=True)
class Phase:
    """A part of a step: forward, backward, waits for messages, update."""

    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    moments: tuple[Moment, ...]
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return self.phases[-1].stop_s

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def timeline(e: Estimate) -> Timeline | None:
    """One micro-batch and the update; None where nothing is known of the time that blocks take.

    Blocks of a pass take equal times. Waits for messages are spread over both passes where parameters are gathered in
    them (stage 3), and follow backward elsewhere.
    """
    if not e.time.compute_s or not e.memory.segments:
        return None
    share = e.passes_of_compute
    waits = e.time.step.exposed + e.time.step.bubble + e.time.step.transfer
    stretched = 1 + (waits / e.time.step.compute if e.messages.gather_s else 0.0)
    one = (e.time.compute_s + e.time.step.tensor / e.micro_batches) * stretched
    forward = one / share
    ends = [("forward", forward), ("backward", one)]
    if not e.messages.gather_s:
        ends.append(("waits", one + waits))
    ends.append(("update", ends[-1][1] + e.time.step.update))
    phases, start = [], 0.0
    for name, stop in ends:
        if stop > start or name == "update":
            phases.append(Phase(name, start, stop))
        start = stop
    moments = [*_passes(e, forward, one), _after(e, one)]
    return Timeline(tuple(_thin(moments)), tuple(phases))


def _passes(e: Estimate, forward: float, one: float) -> Iterator[Moment]:
    """The fullest instant of each block in forward and backward."""
    found = instants(e.memory.segments, e.activations, e.in_flight, every=True)
    rows = [max(group, key=lambda instant: instant.total) for _, group in groupby(found, key=lambda one: one.where)]
    weights = [1.0 if segment.block else OUTSIDE for segment in e.memory.segments]
    assert len(rows) == len(weights)
    for backward, start, stop in ((False, 0.0, forward), (True, forward, one)):
        here = [i for i, segment in enumerate(e.memory.segments) if segment.backward == backward]
        whole, at = sum(weights[i] for i in here), start
        for i in here:
            yield _moment(e, at, rows[i])
            at += (stop - start) * weights[i] / whole


def _moment(e: Estimate, start_s: float, instant: Instant) -> Moment:
    kept = e.memory.persistent_states
    return Moment(
        start_s, instant.where, kept.parameters, kept.optimizer, kept.gradients + instant.gradients, instant.gathered,
        instant.buffers, instant.activations,
    )  # fmt: skip


def _after(e: Estimate, start_s: float) -> Moment:
    """Between backward and the end of the update."""
    states = e.memory.device_states
    buffers = 0 if e.hardware.device == "cuda" else e.memory.fullest.buffers
    return Moment(start_s, "update", states.parameters, states.optimizer, states.gradients, 0, buffers, 0)


def _thin(moments: list[Moment]) -> list[Moment]:
    """No more than MOST moments: of neighbours the fullest, from when the first begins. The last is kept."""
    *before, last = moments
    size = -(-len(before) // MOST)
    groups = [before[i : i + size] for i in range(0, len(before), size)]
    fullest = [max(group, key=lambda moment: moment.total) for group in groups]
    return [*(replace(m, start_s=group[0].start_s) for m, group in zip(fullest, groups, strict=True)), last]
