"""A plan in a few sentences: what to choose and why, what to expect of it, and what would change the answer."""

from __future__ import annotations

from onefold.cost.text import format_bytes, format_seconds
from onefold.planner.answer import Plan
from onefold.planner.rows import Recommendation, Row

NOTICED = 0.1  # of a step: what messages may take before they are spoken of
NEAR = 4  # times a device's memory: what needs more is no question of another device


def summary(plan: Plan) -> tuple[str, str, str]:
    """What to choose, why, and what to expect of it: a sentence each."""
    choice, row = plan.recommendation, plan.chosen
    known = row.activations != "unknown"
    tp = f", tp {choice.tp}" * (choice.tp > 1)
    batch = f", batch {choice.batch}, activations {choice.activations}" * known
    offload = ", no offload" * (choice.optimizer == "device" and choice.parameters == "device")
    what = f"{choice.label}{tp}{batch}{offload}"
    memory = format_bytes(plan.hardware.memory_bytes)
    if not choice.fits:
        remedy = f"Try {', '.join(plan.remedies[:-1])}, or {plan.remedies[-1]}."
        return f"Nothing fits. Closest: {what}.", f"Why: it {choice.reason}.", remedy
    peak = f"{format_bytes(choice.peak_bytes)} of {memory} at the peak"
    expected = [peak] if known else [f"{peak}, without activations"]
    if row.tokens_per_s:
        expected.append(f"{row.tokens_per_s:,.0f} tokens/s")
    if row.mfu:
        expected.append(f"MFU {row.mfu:.0%}")
    bound = " The link is the bound." if row.compute_s and row.exposed_s > row.compute_s else ""
    return f"Choose {what}.", f"Why: {choice.reason}.", f"Expect {', '.join(expected)}.{bound}"


def changes(plan: Plan) -> list[str]:
    """What would change the answer, each in one sentence."""
    choice, row, memory = plan.recommendation, plan.chosen, plan.hardware.memory_bytes
    if row.fits and not choice.fits:  # the global batch is too large, and no other device changes that
        return []
    found = []
    if row.fewest_ranks is None:
        found.append(f"ranks: {choice.label} fits on no number of them")
    elif row.fewest_ranks != plan.ranks:
        more = "more" if row.fewest_ranks > plan.ranks else "fewer"
        found.append(f"{more} ranks: {choice.label} fits on {row.fewest_ranks:,} or more")
    if (enough := plan.ranks_without_offload) is not None and enough > plan.ranks:
        found.append(f"more ranks: without offload, stage 3 fits on {enough:,} or more")
    usable = plan.hardware.usable_bytes / memory
    most = choice.stage + (choice.optimizer != "device")  # without offload the same stage is simpler
    least = min(1, plan.ranks - 1)  # one rank has but one stage
    simpler = [other for other in _stages(plan) if least <= other.stage < most and not other.fits]
    if simpler and simpler[-1].peak_bytes < NEAR * memory:
        needed = format_bytes(simpler[-1].peak_bytes / usable)
        found.append(f"more memory: {simpler[-1].label} needs devices of {needed}")
    found += _links(row) if choice.fits else []
    if choice.fits and row.bubble_s > NOTICED * row.step_s:
        waits = f"{format_seconds(row.bubble_s)} of {format_seconds(row.step_s)}"
        found.append(f"micro-batches: stages of the pipeline wait for each other {waits}; more micro-batches help")
    if (other := next((one for one in plan.recommendations[1:] if one.fits), None)) is not None:
        batch = f", batch {other.batch}" * (row.activations != "unknown")
        tp = f", tp {other.tp}" * (other.tp != choice.tp)
        found.append(f"the next best: {other.label}{tp}{batch}: {other.reason}")
    if plan.hybrid is not None:
        found.append(f"another mesh: {plan.proposed_mesh}")
    if row.days is not None:
        found.append(f"the tokens asked for take {row.days:,.1f} days")
    return found


def other_activations(plan: Plan) -> str:
    """Which stages of the table recompute their blocks in another way than the choice: those that need more memory."""
    tp, policy = plan.recommendation.tp, plan.chosen.activations
    plain = {row.label for row in plan.stages} - {plan.chosen.label}
    others: dict[str, list[str]] = {}
    for one in sorted(plan.recommendations, key=lambda one: one.stage):
        if one.label in plain and one.tp == tp and one.activations != policy:
            others.setdefault(one.activations, []).append(one.label.removeprefix("stage "))
    return " ".join(f"Stage {', '.join(stages)}: activations {other}." for other, stages in others.items())


def _links(row: Row) -> list[str]:
    """Whether messages are what a step waits for."""
    waits = f"a step waits {format_seconds(row.exposed_s)} of {format_seconds(row.step_s)} for messages"
    if row.compute_s and row.bandwidth_bound:
        more = f"; from batch {row.break_even_batch} on compute hides them" if row.break_even_batch else ""
        why = "the link is the bound: all-gathers take longer than the compute beside them, whatever is prefetched; "
        if row.k_star > row.units:
            why += f"to hide one takes the compute of k* = {row.k_star} units, and there are {row.units}; "
        return [f"links: {why}{waits}{more}"]
    if row.compute_s and row.exposed_s > NOTICED * row.step_s:
        return [f"links: {waits}; faster links or a larger batch help"]
    return []


def _stages(plan: Plan) -> list[Recommendation]:
    """Stages 0 to 3 on the device, as far as they were considered, each at the batch that is best for it."""
    plain = {row.label for row in plan.stages}
    tp = plan.recommendation.tp
    return sorted(
        (one for one in plan.recommendations if one.label in plain and one.tp == tp), key=lambda one: one.stage
    )
