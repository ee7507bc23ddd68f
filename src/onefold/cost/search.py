"""A question to the planner, and searches that answer it: the largest batch, the fewest ranks, the largest model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from onefold.comm.strategy import Strategy
from onefold.cost.activations import check_policy
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import Hardware
from onefold.cost.states import StateCost
from onefold.cost.work import Grid, Work, grid_of
from onefold.errors import ConfigError

STATES_SHARE = 0.7  # of a device's memory: what states may take where activations are unknown
LARGEST_BATCH = 1 << 14
SEQUENCE_STEP, LONGEST = 1024, 1 << 26  # tokens
MOST = 10**6  # of batches, micro-batches and prefetched units

AUTO = "auto"  # also consider to keep all activations: faster, if the memory that a higher stage frees is used for it


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained on which hardware; None where the planner may choose."""

    work: Work
    ranks: int
    hardware: Hardware
    cost: StateCost
    tp: int | None = 1
    pp: int = 1
    replica: int = 1
    sequence: int = 1
    batch: int | None = None
    micro_batches: int = 1
    max_global_batch: int | None = None
    activations: str | None = None
    prefetch: int = 1
    reshard_after_forward: bool = True
    in_backward: bool = False  # updates run in backward
    compiled: bool = False  # blocks are compiled
    strategy: Strategy | None = None  # how gradients are summed; None: as on the hardware
    stage: int | None = None  # the stage that is asked about; the others are weighed all the same
    optimizer_tier: str | None = None  # device, host or disk, likewise
    parameters_tier: str | None = None

    def asks_about(self, choice: Choice) -> bool:
        """Whether a choice is one of those that are asked about: all, unless a stage or a tier is given."""
        wanted = (self.stage, self.optimizer_tier, self.parameters_tier)
        there = (choice.stage, choice.optimizer, choice.parameters)
        return all(want is None or want == have for want, have in zip(wanted, there, strict=True))

    def grid(self, tp: int | None = None) -> Grid:
        return grid_of(self.ranks, tp=tp or self.tp or 1, pp=self.pp, replica=self.replica, sequence=self.sequence)

    def price(self, choice: Choice, grid: Grid, batch: int) -> Estimate:
        return Estimate(
            work=self.work, choice=choice, grid=grid, hardware=self.hardware, cost=self.cost, batch=batch,
            micro_batches=self.micro_batches, prefetch=self.prefetch, in_backward=self.in_backward,
            reshard_after_forward=self.reshard_after_forward, known_strategy=self.strategy,
            compiled=self.compiled,
        )  # fmt: skip


def fits(estimate: Estimate) -> bool:
    """Whether a choice fits, with a reserve for activations if they are unknown."""
    known = estimate.work.knows_activations
    return estimate.fits and (known or estimate.peak_bytes <= STATES_SHARE * estimate.hardware.memory_bytes)


def most(accept: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that is accepted, provided all smaller ones are; 0 if 1 is not."""
    if not accept(1):
        return 0
    low, high = 1, 2
    while high <= limit and accept(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accept(middle) else (low, middle)
    return low


def largest_batch(question: Question, choice: Choice, grid: Grid) -> int:
    """The most sequences per replica and micro-batch that fit; 0 if not even one fits."""
    limit = LARGEST_BATCH
    if question.max_global_batch is not None:
        limit = question.max_global_batch // (grid.data * question.micro_batches)
    if not question.work.knows_activations:
        return int(fits(question.price(choice, grid, 1)))
    return most(lambda batch: fits(question.price(choice, grid, batch)), limit) if limit else 0


def longest_sequence(question: Question, choice: Choice, grid: Grid) -> int:
    """The most tokens, in steps of 1024 on each rank, of which one sequence fits; 0 if not even 1024 do."""
    step = SEQUENCE_STEP * grid.sequence

    def accept(steps: int) -> bool:
        assert question.work.shape is not None
        work = dataclasses.replace(
            question.work, shape=dataclasses.replace(question.work.shape, seq=steps * step), _cache={}
        )
        return fits(dataclasses.replace(question, work=work).price(choice, grid, 1))

    return most(accept, LONGEST // step) * step


def fewest_ranks(question: Question, choice: Choice, limit: int = 1 << 16) -> int | None:
    """The smallest number of ranks, in steps of the grid's other axes, on which a choice fits."""
    step = (question.tp or 1) * question.pp * question.replica * question.sequence
    numbers = [step]
    while numbers[-1] < limit:
        numbers.append(numbers[-1] * 2)

    def enough(ranks: int) -> bool:
        smaller = dataclasses.replace(question, ranks=ranks)
        priced = smaller.price(choice, smaller.grid(), question.batch or 1)
        return priced.memory.persistent_states.total <= priced.hardware.usable_bytes and fits(priced)

    found = next((ranks for ranks in numbers if enough(ranks)), None)
    if found is None or found == step:
        return found
    low, high = found // 2 // step, found // step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle * step) else (middle, high)
    return high * step


def largest_model(estimate: Estimate) -> int:
    """The number of parameters whose states fill the devices, as the paper counts: nothing else, and host and disk are
    unlimited."""
    if not estimate.memory.device_states.total or estimate.choice.parameters != "device":
        return 0
    cut = estimate.grid.tp * estimate.grid.pp
    return int(estimate.hardware.memory_bytes * estimate.sizes.numel / estimate.memory.device_states.total * cut)


def days(tokens: float, tokens_per_s: float) -> float:
    return tokens / tokens_per_s / 86400


def within_global_batch(question: Question, e: Estimate) -> bool:
    """Whether a step has no more samples than the question allows."""
    return question.max_global_batch is None or e.samples_per_step <= question.max_global_batch


def check_question(question: Question) -> None:
    """Raises for contradictory settings, before anything is priced."""
    if question.activations not in (None, AUTO):
        check_policy(str(question.activations), question.tp or 2)
    for name in ("batch", "micro_batches", "max_global_batch", "prefetch"):
        value = getattr(question, name)
        least = 0 if name == "prefetch" else 1
        if value is not None and (type(value) is not int or not least <= value <= MOST):
            raise ConfigError(f"{name}={value!r} is not a whole number from {least} to {MOST:,}")
    if question.stage is not None and question.stage not in range(4):
        raise ConfigError(f"stage={question.stage!r} is not 0, 1, 2 or 3")
    if question.in_backward and question.micro_batches > 1:
        raise ConfigError("updates in backward leave nothing to accumulate: use one micro-batch, or leave them out")
    grid = question.grid()
    if question.work.shape is not None:
        question.work.shape.check(grid.tp, grid.pp)
