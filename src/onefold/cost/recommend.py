"""Ranks choices, with reasons.

1 Every choice is priced at the given batch, or at the largest that fits. 2 Of stages 0 to 2 the fastest is taken; those
within a few per cent of it count as equal, and among equals the simplest is taken. 3 Sharded parameters or offload are
taken where nothing less fits, or where they are clearly faster at the same batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onefold.cost.activations import SPEED_TOLERANCE, Option, choose_activations
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.search import AUTO, Question, fits, largest_batch, most, within_global_batch
from onefold.cost.text import format_bytes, format_seconds
from onefold.cost.work import Grid
from onefold.errors import ConfigError

MANIFOLD = 4  # times: from here on a percentage says little
MIN_SPEEDUP = 1.25  # of sharded parameters or offload, to be chosen where stages 0 to 2 fit

# From the simplest on. Sharding optimizer state costs nothing, so stage 0 comes after it.
CHOICES = (
    Choice(1), Choice(0), Choice(2), Choice(3), Choice(2, optimizer="host"), Choice(3, optimizer="host"),
    Choice(3, optimizer="host", parameters="host"), Choice(3, optimizer="disk"),
    Choice(3, optimizer="disk", parameters="host"), Choice(3, optimizer="disk", parameters="disk"),
)  # fmt: skip
POLICIES = {
    False: ("checkpoint", "checkpoint+host"),
    True: ("checkpoint", "partition", "partition+host"),
}  # with tp or without


class Ranked(NamedTuple):
    """A choice that was considered, and the reason for its rank."""

    estimate: Estimate
    fits: bool
    reason: str


def recommend(question: Question) -> list[Ranked]:
    """All choices, the best first; those that are asked about come before the others."""
    ranked = _ranked(question)
    asked = [r for r in ranked if question.asks_about(r.estimate.choice)]
    if not asked:
        raise ConfigError(
            f"stage={question.stage} with the optimizer on {question.optimizer_tier or 'any tier'} and parameters on "
            f"{question.parameters_tier or 'any tier'} is no choice of the plan; offload starts at stage 2, and "
            f"parameters go to host or disk at stage 3, with the optimizer"
        )
    best = ranked[0]
    if asked[0] is not best and asked[0].fits:
        good = sorted((r.estimate for r in asked if r.fits), key=_rank_in_choices)
        chosen = _simplest(good)
        rest = [r for r in asked if r.estimate is not chosen]
        asked = [Ranked(chosen, True, _why_asked(chosen, best.estimate)), *rest]
    return asked + [r for r in ranked if not question.asks_about(r.estimate.choice)]


def _ranked(question: Question) -> list[Ranked]:
    found = [_best_activations(question, choice, grid) for grid in _grids(question) for choice in _choices(question)]
    found += [filled for e in found if (filled := fill_device(question, e)) is not None]
    good = [e for e in found if e.batch and fits(e) and within_global_batch(question, e)]
    if not good:
        closest = sorted(found, key=lambda e: (e.peak_bytes, e.memory.host_bytes))
        if in_memory := [e for e in found if e.batch and fits(e)]:  # only the global batch is too large
            first = _choose(question, in_memory)
            closest = [first, *(e for e in closest if e is not first)]
        return [Ranked(e, False, _why_unfit(question, e)) for e in closest]
    chosen = _choose(question, good)
    rest = sorted((e for e in good if e is not chosen), key=lambda e: -_speed(e))
    ranked = [Ranked(chosen, True, _why_chosen(chosen, rest, found))]
    ranked += [Ranked(e, True, _why_not(e, chosen)) for e in rest]
    return ranked + [Ranked(e, False, _why_unfit(question, e)) for e in found if not any(e is other for other in good)]


def _choose(question: Question, good: Sequence[Estimate]) -> Estimate:
    """The simplest of the choices that are as fast as the fastest. Sharded parameters or offload must be clearly faster
    at the batch that fits without them; a larger batch alone is no reason."""
    plain = [e for e in good if e.choice.stage < 3 and e.choice.optimizer == "device"]
    first = _simplest(plain or good)
    if not plain:
        return first
    others = [question.price(e.choice, e.grid, first.batch) for e in good if e not in plain]
    faster = [e for e in others if _speed(e) > MIN_SPEEDUP * _speed(first)]
    if not faster:
        return first
    winner = _simplest(faster)
    return next(e for e in good if e.choice == winner.choice and e.grid == winner.grid)


def _simplest(choices: Sequence[Estimate]) -> Estimate:
    best = max(_speed(e) for e in choices)
    return next(e for e in choices if _speed(e) >= (1 - SPEED_TOLERANCE) * best)


def _why_unfit(question: Question, e: Estimate) -> str:
    if not within_global_batch(question, e):
        most = question.max_global_batch
        return (
            f"makes a global batch of {e.samples_per_step} with {e.batch * e.micro_batches} on each of {e.grid.data} "
            f"replicas, and {most} is allowed"
        )
    return _too_large(e)


def _speed(estimate: Estimate) -> float:
    """Samples per second; where compute is unknown, steps per second."""
    return estimate.samples_per_step / estimate.step_s if estimate.step_s else 1.0


def _choices(question: Question) -> Iterator[Choice]:
    """The choices to consider; with one rank only stage 0, with and without offload."""
    alone = question.grid().shard == 1 and question.stage is None
    for choice in CHOICES:
        if alone and choice in (Choice(1), Choice(2), Choice(2, optimizer="host"), Choice(3)):
            continue
        yield choice
        if choice == Choice(3) and (threshold := _replicated_below(question)):
            yield choice._replace(keep_whole=threshold)


def _replicated_below(question: Question) -> int:
    """The size up to which units may stay replicated at stage 3: those of norms and biases, if they are separate and
    few."""
    if question.work.shape is None:
        return 0
    used = sorted(unit.used_numel for unit in question.work.sizes(question.grid()).units)
    threshold = max((size for size in used if size * 100 < used[-1]), default=0)
    return threshold if sum(size for size in used if size <= threshold) * 20 < sum(used) else 0


def _grids(question: Question) -> list[Grid]:
    """The given grid; or tensor parallelism as far as it divides the model, never beyond a node."""
    if question.tp is not None or question.work.tile is not None:  # a tiled loss needs a head that is not split
        return [question.grid()]
    degrees = [1]
    shape = question.work.shape
    while (
        degrees[-1] * 2 <= question.hardware.node_ranks
        and question.ranks % (degrees[-1] * 2 * question.pp * question.replica * question.sequence) == 0
    ):
        if shape is None or shape.heads % (degrees[-1] * 2) or shape.hidden % (degrees[-1] * 2):
            break
        degrees.append(degrees[-1] * 2)
    return [question.grid(tp) for tp in degrees]


def fill_device(question: Question, estimate: Estimate) -> Estimate | None:
    """A choice with as many units updated on the device as it has room for (optimizer="auto"), if these are some and
    not all; only at a given batch, since the largest batch leaves no room."""
    choice, placements = estimate.choice, estimate.placements
    if question.batch is None or choice.optimizer != "host" or choice.parameters != "device" or not fits(estimate):
        return None
    on_host = sum(unit.trained and p.updated_on_host for unit, p in zip(estimate.sizes.units, placements, strict=True))

    def priced(units: int) -> Estimate:
        return question.price(choice._replace(device_units=units), estimate.grid, estimate.batch)

    units = most(lambda units: fits(priced(units)), on_host)
    return priced(units) if 0 < units < on_host else None


def _best_activations(question: Question, choice: Choice, grid: Grid) -> Estimate:
    """A choice with the simplest activation policy that the batch allows: recomputing and moving inputs cost time."""
    if not question.work.knows_activations:
        return question.price(choice, grid, int(fits(question.price(choice, grid, 1))))
    return activations_for(question, choice, grid)[0]


def activations_for(question: Question, choice: Choice, grid: Grid) -> tuple[Estimate, str]:
    """A choice with the best activation policy, and the reason."""
    priced, options = {}, []
    for policy in _policies(question, grid):
        chosen = choice._replace(activations=policy)
        batch = question.batch or largest_batch(question, chosen, grid)
        if question.max_global_batch is not None:
            batch = min(batch, question.max_global_batch // (grid.data * question.micro_batches))
        priced[policy] = estimate = question.price(chosen, grid, max(batch, 1))
        needs = f"{_peak_of_memory(estimate)} at batch {estimate.batch}"
        options.append(Option(policy, bool(batch) and fits(estimate), _speed(estimate), needs))
    policy, why = choose_activations(options)
    return priced[policy], why


def _policies(question: Question, grid: Grid) -> tuple[str, ...]:
    """The activation policies to consider; by default all choices recompute blocks, and are compared so."""
    if question.activations not in (None, AUTO):
        return (str(question.activations),)
    return ("keep", *POLICIES[grid.tp > 1]) if question.activations == AUTO else POLICIES[grid.tp > 1]


# -- reasons ----------------------------------------------------------------------------------------------------------


def _peak_of_memory(estimate: Estimate) -> str:
    return f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.hardware.memory_bytes)}"


def _too_large(estimate: Estimate) -> str:
    memory = estimate.hardware.memory_bytes
    if estimate.peak_bytes > memory or (not estimate.fits and not estimate.memory.host_bytes):
        return f"needs {_peak_of_memory(estimate)}"
    if estimate.peak_bytes > estimate.hardware.usable_bytes:
        return f"needs {_peak_of_memory(estimate)}, too close to the edge"
    if estimate.fits:
        return (
            f"needs {format_bytes(estimate.peak_bytes)} of {format_bytes(memory)} and leaves too little for activations"
        )
    node = min(estimate.grid.ranks, estimate.hardware.node_ranks)
    host, disk = (format_bytes(nbytes * node) for nbytes in (estimate.memory.host_bytes, estimate.memory.disk_bytes))
    return f"needs {host} of host memory and {disk} of disk per node"


def _why_chosen(chosen: Estimate, others: list[Estimate], found: list[Estimate]) -> str:
    """The reason for a choice: why the next simpler one does not do, and the next heavier one is not needed."""
    parts = []
    same = [e for e in found if e.grid == chosen.grid]
    rank = _rank_in_choices(chosen)
    lighter = [e for e in same if _rank_in_choices(e) < rank and e.choice.stage < chosen.choice.stage]
    if lighter:
        last = max(lighter, key=lambda e: e.choice.stage)
        if not (last.batch and fits(last)):
            parts.append(f"{last.choice} {_too_large(last)}")
        else:
            parts.append(f"{last.choice} would be {_percent(_speed(chosen) / _speed(last) - 1)} slower")
    three = next((e for e in others if e.grid == chosen.grid and e.choice[:4] == Choice(3)[:4]), None)
    if three is not None and chosen.choice.stage < 3:
        three = dataclasses.replace(three, batch=chosen.batch)
        saved = chosen.memory.device_states.total - three.memory.device_states.total
        traffic = three.messages.traffic_elements / max(chosen.messages.traffic_elements, 1)
        more = f"cost {traffic - 1:.0%} more traffic" if traffic < MANIFOLD else f"send {traffic:,.0f} times as much"
        parts.append(f"stage 3 would save {format_bytes(saved)} you do not need and {more}")
    elif chosen.choice.stage < 3 and chosen.grid.shard > 1:
        parts.append("it sends no more than plain data parallelism")
    if chosen.choice.activations.startswith("partition"):
        parts.append(_why_activations(chosen))
    if not parts:
        parts.append(f"{_peak_of_memory(chosen)} at the peak")
    return "; ".join(parts)


def _why_asked(asked: Estimate, best: Estimate) -> str:
    faster = _speed(best) / _speed(asked) - 1
    better = f"{_percent(faster)} faster" if faster > SPEED_TOLERANCE else "simpler and no slower"
    batch = f" at batch {best.batch}" if best.work.knows_activations else ""
    return f"it was asked for; {best.choice}{batch} would be {better}"


def _why_activations(chosen: Estimate) -> str:
    if chosen.choice.activations == "partition":
        return f"block inputs are shared {chosen.grid.tp} ways (P_a) for under 10% more tensor-parallel traffic"
    return "block inputs go to host memory (P_a+cpu), since nothing else fits or the batch it allows pays for it"


def _why_not(estimate: Estimate, chosen: Estimate) -> str:
    slower = _speed(chosen) / _speed(estimate) - 1
    if slower > SPEED_TOLERANCE:
        waits = estimate.time.step.exposed + estimate.time.step.transfer
        waiting = (
            f", waiting {format_seconds(waits)} of {format_seconds(estimate.step_s)} per step"
            if waits > 0.1 * estimate.step_s
            else ""
        )
        return f"{_percent(slower)} slower{waiting}"
    if _rank_in_choices(estimate) > _rank_in_choices(chosen):
        return f"no faster, and leaves {format_bytes(estimate.hardware.memory_bytes - estimate.peak_bytes)} unused"
    return "no faster"


def _rank_in_choices(estimate: Estimate) -> int:
    plain = estimate.choice._replace(keep_whole=0, device_units=0, activations=Choice(0).activations)
    return CHOICES.index(plain)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}%" if fraction < 3 else f"{1 + fraction:.1f}×"
