"""What a rank holds: each state once across ranks where its stage shards it, constant buffers, nothing new per step."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import onefold
from onefold.observe.tracker import CATEGORIES
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import storages
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import GPT, Case, Layers, token_loss
from tests.parity.test_traffic import CASES, padded_bytes, started
from tests.parity.training import Run

STAGES = (0, 1, 2, 3)
WIDTH = 64
BLOCK_BYTES = ONE_LAYER = WIDTH * WIDTH * 4  # as bucket_bytes: each layer a unit
STATE_FACTOR = {"adam": 2, "sgd-momentum": 1, "sgd": 0}  # elements of state per parameter element
COUNT_BYTES = {"adam": 4, "sgd-momentum": 0, "sgd": 0}  # per slice of a unit: Adam's step count


def layers(depth: int, trait: str = "") -> nn.Module:
    """Equal layers: run as registered, against it ("backward"), with units of two sizes, or with a unit unused."""
    model = Layers(WIDTH, depth, bias=trait == "two sizes", backward=trait == "backward")
    if trait == "unused head":
        model.head = nn.Linear(2, 2)
    return model


def tower(depth: int, trait: str = "") -> Case:
    def loss(model: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        return model(torch.randn(2, WIDTH, generator=generator)).square().mean()

    return Case(lambda: layers(depth, trait), loss)


# -- resident ----------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    report: onefold.MemoryReport
    units: list[tuple[list[int], int]]  # sizes of a trained unit's parameters, and bytes per element
    frozen: list[tuple[list[int], int]]  # the same of frozen units, where those are spread
    frozen_bytes: int  # of parameters that stay where they are


def hold(run: Run) -> Held:
    return held_by(run, CASES[run.model])


def hold_gpt(run: Run, layers: int) -> Held:
    return held_by(run, Case(lambda: GPT(layers=layers), token_loss))


def hold_tower(run: Run, depth: int, trait: str = "") -> Held:
    return held_by(run, tower(depth, trait))


def held_by(run: Run, case: Case) -> Held:
    model, step = started(run, case)
    for _ in range(3):
        step()
    engine, report = engine_of(model), onefold.memory(model)
    sizes = [([p.numel() for p in unit.params], unit.params[0].itemsize) for unit in engine.all_units]
    trained, alone = len(engine.units), sum(param.nbytes for _, param in engine.frozen)
    return Held(report, sizes[:trained], sizes[trained:], alone)


def parameter_bytes(held: Held, stage: int, ranks: int) -> int:
    """Whole; or a shard, and for each parameter one element that reads as NaN."""
    if stage < 3 or ranks == 1:
        return padded_bytes(held.units, ranks) + held.frozen_bytes
    every = held.units + held.frozen
    return padded_bytes(every, ranks) // ranks + sum(len(sizes) * itemsize for sizes, itemsize in every)


@pytest.mark.parametrize(
    ("model", "optimizer", "ranks"),
    thinned(["gpt-tied", "conv", "odd", "skipping", "mixed"], ["adam", "sgd-momentum"], [1, 2, 3, 4]),
)
def test_every_state_is_held_as_the_table_of_stages_says(model: str, optimizer: str, ranks: int) -> None:
    held = {s: run_ranks(ranks, hold, Run(model=model, optimizer=optimizer, stage=s)) for s in STAGES}
    whole = padded_bytes(held[0][0].units, ranks)
    for stage, by_rank in held.items():
        for report in (rank.report for rank in by_rank):
            wanted = parameter_bytes(by_rank[0], stage, ranks)
            assert report.parameters.measured == report.parameters.planned == wanted
            assert report.gradients.measured == report.gradients.planned == (whole if stage < 2 else whole // ranks)
            assert report.optimizer.measured == report.optimizer.planned
    for lower, higher in pairwise(STAGES):
        for a, b in zip(held[lower], held[higher], strict=True):
            assert b.report.states <= a.report.states
    if ranks > 1:
        totals = [sum(rank.report.states for rank in held[stage]) for stage in STAGES]
        assert totals[0] > totals[1] > totals[2] > totals[3]


@pytest.mark.parametrize(
    ("model", "optimizer", "ranks"), thinned(["gpt", "odd"], ["adam", "sgd-momentum", "sgd"], [2, 3, 4])
)
def test_optimizer_state_is_stored_once_across_ranks(model: str, optimizer: str, ranks: int) -> None:
    """All ranks together hold what one rank holds at stage 0; only step counts, one per slice, repeat."""
    run = Run(model=model, optimizer=optimizer)
    whole = run_ranks(ranks, hold, run.at(0))
    units = whole[0].units
    counts = COUNT_BYTES[optimizer] * len(units)
    elements = padded_bytes(units, 1) * STATE_FACTOR[optimizer]
    assert {rank.report.optimizer.measured for rank in whole} == {elements + counts}
    for stage in STAGES[1:]:
        shards = [rank.report.optimizer.measured for rank in run_ranks(ranks, hold, run.at(stage))]
        assert elements + counts <= sum(shards) <= elements + counts * ranks
        largest_shard = padded_bytes(units, ranks) * STATE_FACTOR[optimizer] // ranks
        assert max(shards) <= largest_shard + counts


@pytest.mark.parametrize(("stage", "ranks"), thinned(STAGES, [2, 4]))
def test_four_times_the_depth_needs_no_more_communication_buffers(stage: int, ranks: int) -> None:
    run = Run(stage=stage, bucket_bytes=32 << 10)  # a unit per block
    shallow, deep = (run_ranks(ranks, hold_gpt, run, layers)[0].report for layers in (3, 12))
    assert deep.parameters.measured > 3 * shallow.parameters.measured
    assert deep.communication.measured == shallow.communication.measured > 0


@pytest.mark.parametrize(  # stage 3 keeps buffers of its first step when blocks run backwards
    ("stage", "trait", "ranks"), thinned([0, 1, 2], ["", "two sizes", "backward", "unused head"], [2, 3])
)
def test_communication_buffers_keep_to_the_plan_at_any_depth(stage: int, trait: str, ranks: int) -> None:
    """Also where blocks run against their registration, and where some unit's gradient never comes."""
    shallow, deep = (
        run_ranks(ranks, hold_tower, Run(stage=stage, bucket_bytes=ONE_LAYER), depth, trait)[0].report
        for depth in (8, 16)
    )
    assert shallow.communication.planned == deep.communication.planned
    assert deep.communication.measured == shallow.communication.measured <= shallow.communication.planned


@pytest.mark.parametrize(("stage", "reduce"), thinned(STAGES, ["each", None]))
def test_communication_buffers_keep_to_the_plan_under_accumulation(stage: int, reduce: str | None) -> None:
    report = run_ranks(2, hold_tower, Run(stage=stage, micro=3, reduce=reduce, bucket_bytes=ONE_LAYER), 8)[0].report
    assert report.communication.measured <= report.communication.planned
    assert report.gradients.measured == report.gradients.planned


def test_the_report_prints_every_category_with_its_bytes() -> None:
    held = run_ranks(2, hold, Run(model="conv", stage=3))[0]
    rows = {line[:26].strip(): line[26:].split() for line in str(held.report).splitlines()[1:]}
    wanted = {name: getattr(held.report, name) for name in CATEGORIES if name not in ("checkpoints", "activations")}
    shown = {"buffers": "module buffers", "communication": "working buffers"}
    limit = {"communication": ["≤"]}  # of working buffers a plan is a bound
    assert rows == {
        **{
            shown.get(name, name): [f"{found.measured:,}", *limit.get(name, []), f"{found.planned:,}"]
            for name, found in wanted.items()
        },
        "total": [f"{sum(found.measured for found in wanted.values()):,}"],
    }
    assert min(found.measured for found in wanted.values()) > 0


# -- peak --------------------------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """One step in steady state. `grown` and `allocator` are the same figure, by our tracker and by torch's profiler."""

    total: int
    gradients: int  # with communication: a borrowed buffer is one or the other, by the moment
    activations: int
    grown: int
    allocator: int


def peak_of(stage: int, depth: int) -> Peak:
    model, step = started(Run(stage=stage, optimizer="adamw-fused", bucket_bytes=ONE_LAYER), tower(depth))
    step()
    step()
    resident = onefold.memory(model).total
    with onefold.track_memory(model) as tracker:
        step()
    peak = tracker.peak()
    assert tracker.peak_bytes == sum(peak.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = fullest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        fullest = max(fullest, now)
    gradients = peak["gradients"] + peak["communication"]
    return Peak(tracker.peak_bytes, gradients, peak["activations"], tracker.peak_bytes - resident, fullest)


@pytest.mark.parametrize(("depth", "ranks"), thinned([8, 12], [2, 4]))
def test_a_higher_stage_has_no_higher_peak(depth: int, ranks: int) -> None:
    zero, one, two, three = (run_ranks(ranks, peak_of, stage, depth)[0] for stage in STAGES)
    assert three.total < two.total < one.total < zero.total
    assert three.gradients <= two.gradients < one.gradients <= zero.gradients
    by_stage = [stage.activations for stage in (zero, one, two, three)]
    assert by_stage == sorted(by_stage, reverse=True), "a stage makes temporaries of its own"
    assert zero.activations < 2 * BLOCK_BYTES, "more than one gradient was outside our buffers at once"


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_2_gradients_grow_with_depth_by_the_shard_only(ranks: int) -> None:
    shallow, deep = (run_ranks(ranks, peak_of, 2, depth)[0] for depth in (8, 16))
    assert deep.gradients - shallow.gradients == 8 * BLOCK_BYTES // ranks
    assert deep.gradients < 16 * BLOCK_BYTES, "all gradients were in memory at once"


@pytest.mark.parametrize("stage", STAGES)
def test_the_tracker_sees_the_peak_that_the_allocator_sees(stage: int) -> None:
    peak = run_ranks(2, peak_of, stage, 8)[0]
    assert peak.grown == peak.allocator > 0


# -- steady ------------------------------------------------------------------------------------------------------------


def storages_by_step(run: Run) -> list[list[tuple[int, str, int]]]:
    """After each of four steps in steady state: every storage of ours, where it lies and how long it is."""
    model, step = started(run, CASES[run.model])
    step()
    step()
    kept, rows = [], []  # kept: a storage freed and made anew cannot come back under its old address
    for _ in range(4):
        found = storages(engine_of(model))
        kept.append([tensor for _, tensor in found.values()])
        rows.append(sorted((key, kind, t.untyped_storage().nbytes()) for key, (kind, t) in found.items()))
        step()
    return rows


STEPS = [{}, {"clip": 0.1}, {"micro": 3, "reduce": "each"}, {"micro": 3, "reduce": "once", "clip": 0.1}]


@pytest.mark.parametrize(("steps", "stage", "ranks"), thinned(STEPS, STAGES, [1, 2]))
def test_nothing_of_ours_is_allocated_after_two_steps(steps: dict, stage: int, ranks: int) -> None:
    for first, *later in run_ranks(ranks, storages_by_step, Run(stage=stage, **steps)):
        assert {kind for _, kind, _ in first} >= {"parameters", "gradients", "optimizer"}
        assert later == [first] * 3
