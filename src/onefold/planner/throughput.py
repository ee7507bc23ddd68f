"""Expected throughput against the number of ranks. A model, not a measurement.

1 Memory: the largest batch whose peak fits, by the plan's own bytes (or the batch that was asked for).
2 Time: one step at that batch (seconds.py): flops over the rate in the hardware table; messages over its links, less
  what compute covers; tensor-parallel sums, the update, what else is waited for.
3 Throughput: samples and flops of a step over that time.

With more ranks each holds a smaller share of the states, so a larger batch fits, and more samples share what a step
waits for. Where a cluster speeds up by more than its number of ranks, that comes from 1 and 2; nothing puts it in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.search import AUTO, Question, fits, largest_batch, within_global_batch
from onefold.cost.seconds import StepSeconds

STATED = "a model, not a measurement"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
POLICIES = {False: ("checkpoint", "checkpoint+host"), True: ("partition", "partition+host")}  # with tp or without


class Point(NamedTuple):
    """What to expect of one number of ranks."""

    ranks: int
    batch: int  # sequences per replica and micro-batch
    global_batch: int
    activations: str
    step: StepSeconds
    flops: float  # of one rank in a step, what is computed again included
    samples_per_s: float  # of all ranks

    @property
    def tflops(self) -> float:
        """Of each rank, per second."""
        return self.flops / self.step.total / 1e12


def rank_counts(question: Question) -> list[int]:
    """The usual numbers of ranks and the one that was asked for, as far as the grid can have them."""
    unit = (question.tp or 1) * question.pp * question.replica * question.sequence
    return [ranks for ranks in sorted({*RANKS, question.ranks}) if ranks % unit == 0]


def expected(question: Question, stage: int | Choice, numbers: Iterable[int]) -> list[Point]:
    """A point for each number of ranks on which a stage, or a choice with its tiers, fits.

    Block inputs are kept as simply as one sequence allows: what is faster does not decide, or less bandwidth could give
    more throughput.
    """
    found = (at(dataclasses.replace(question, ranks=ranks), stage) for ranks in numbers)
    return [point for point in found if point is not None]


def at(question: Question, stage: int | Choice) -> Point | None:
    """One point; None where not even one sequence fits, or what was asked for does not."""
    grid, asked = question.grid(), Choice(stage) if isinstance(stage, int) else stage
    for policy in _policies(question):
        choice = asked._replace(activations=policy)
        batch = question.batch or largest_batch(question, choice, grid)
        if batch and fits(estimate := question.price(choice, grid, batch)) and within_global_batch(question, estimate):
            return _point(estimate)
    return None


def scaling(points: Sequence[Point]) -> list[float]:
    """Throughput over what the first point would give in proportion to ranks: above 1 is more than linear."""
    return [point.samples_per_s / points[0].samples_per_s * points[0].ranks / point.ranks for point in points if points]


def _policies(question: Question) -> tuple[str, ...]:
    if question.activations in (None, AUTO):
        return POLICIES[(question.tp or 1) > 1]
    return (str(question.activations),)


def _point(e: Estimate) -> Point:
    flops = (e.work.flops(e.batch, e.choice.activations, e.grid) + e.work.tile_flops(e.batch, e.grid)) * e.micro_batches
    return Point(
        e.grid.ranks,
        e.batch,
        e.samples_per_step,
        e.choice.activations,
        e.time.step,
        flops,
        e.samples_per_step / e.step_s,
    )
