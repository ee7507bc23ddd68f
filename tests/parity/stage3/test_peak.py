"""Stage 3 holds 1/N of everything, and while it works a constant number of units besides, whatever the depth."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import onefold
from onefold.cost.limits import IN_FLIGHT
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.parity.test_memory import ONE_LAYER, layers, tower
from tests.parity.test_traffic import started
from tests.parity.training import Run

STAGES = (0, 1, 2, 3)


class Used(NamedTuple):
    """Bytes of one rank. `resident` is between steps, the others at the fullest instant of a step."""

    resident: int
    states: int
    parameters: int
    gradients: int  # with what is on its way
    activations: int
    total: int


def use(stage: int, depth: int, prefetch: int = 1, trait: str = "") -> Used:
    run = Run(stage=stage, optimizer="adamw-fused", bucket_bytes=ONE_LAYER, fields=(("prefetch", prefetch),))
    model, step = started(run, tower(depth, trait))
    step()
    step()
    report = onefold.memory(model)
    assert report.parameters.measured == report.parameters.planned
    with onefold.track_memory(model) as tracker:
        step()
    assert onefold.memory(model) == report, "a step left something behind"
    peak = tracker.peak()
    gradients = peak["gradients"] + peak["communication"]
    return Used(report.total, report.states, peak["parameters"], gradients, peak["activations"], tracker.peak_bytes)


@pytest.mark.parametrize(("depth", "ranks"), thinned([8, 16], [2, 4]))
def test_states_are_sixteen_bytes_per_parameter_over_n(depth: int, ranks: int) -> None:
    """fp32: a value, a gradient and two moments; besides a mark and a step count per unit, which are 4 bytes each."""
    psi = sum(p.numel() for p in layers(depth).parameters())
    for used in run_ranks(ranks, use, 3, depth):
        assert used.states == 16 * psi // ranks + 8 * depth


@pytest.mark.parametrize(("trait", "prefetch", "ranks"), thinned(["", "backward"], [0, 1, 3], [2, 4]))
def test_the_peak_is_what_is_resident_and_a_constant_number_of_units(trait: str, prefetch: int, ranks: int) -> None:
    for depth in (8, 16):
        for used in run_ranks(ranks, use, 3, depth, prefetch, trait):
            shards = depth * ONE_LAYER // ranks
            assert used.parameters <= shards + 4 * depth + (prefetch + 2) * ONE_LAYER
            assert used.gradients <= shards + (2 * IN_FLIGHT + 1) * ONE_LAYER, "more than one was being built"
            bound = used.states + (prefetch + 2 + 2 * IN_FLIGHT) * ONE_LAYER
            assert used.total <= bound + used.activations
            assert used.activations < 2 * ONE_LAYER + depth * 1024, "more than one gradient was outside our buffers"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_grows_with_depth_by_the_shard_only(ranks: int) -> None:
    shallow, deep = (run_ranks(ranks, use, 3, depth)[0] for depth in (8, 16))
    assert deep.parameters - shallow.parameters == 8 * ONE_LAYER // ranks + 8 * 4
    assert deep.gradients - shallow.gradients == 8 * ONE_LAYER // ranks


@pytest.mark.parametrize(("depth", "ranks"), thinned([8, 16], [2, 4]))
def test_a_higher_stage_holds_less_and_peaks_lower(depth: int, ranks: int) -> None:
    by_stage = [run_ranks(ranks, use, stage, depth)[0] for stage in STAGES]
    for lower, higher in pairwise(by_stage):
        assert higher.states < lower.states
        assert higher.total < lower.total


def evaluate(depth: int) -> tuple[int, int, int]:
    """What one forward that nobody trains with adds to memory, by our tracker and by torch's profiler, and leaves."""
    model, step = started(Run(stage=3, bucket_bytes=ONE_LAYER), tower(depth))
    step()
    step()
    x, before = torch.ones(2, 64), onefold.memory(model).total
    with onefold.track_memory(model) as tracker, torch.no_grad():
        model(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.no_grad():
        model(x)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    grown = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return tracker.peak_bytes - before, max(grown), onefold.memory(model).total - before


@pytest.mark.parametrize("depth", [8, 16])
def test_evaluation_holds_two_units_and_keeps_none(depth: int) -> None:
    for _, allocator, left in run_ranks(2, evaluate, depth):
        assert 2 * ONE_LAYER <= allocator < 2.5 * ONE_LAYER
        assert left == 0, "a unit was kept, and no backward will come"


def test_the_tracker_sees_what_the_allocator_sees_in_evaluation() -> None:
    for tracker, allocator, _ in run_ranks(2, evaluate, 8):
        assert tracker == allocator
