"""Offload(optimizer="auto"): parameters that do not fit on the device are in host memory, or on disk, to the same bits.

Where they are at first is decided by formula, before anything is on the device; the first step then brings those that
fit. "It fits" is measured: bytes of tensors at the
fullest instant of a run, beside those of Offload(optimizer="host", parameters="host"), the smallest there is.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import ConfigError, OffloadError
from onefold.model.device import move
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual
from tests.offload.test_auto import Outcome, Work, build, differing, step, tiers_of, train

ACTIVATIONS = 8 * 6 * 32 * 4  # bytes that 8 blocks of width 32 keep for each row
PLACEHOLDERS = 1024  # bytes at most: one element for each parameter that is sharded
SMALLEST = onefold.Offload(optimizer="host", parameters="host")


def parameter_tiers(model: Any) -> list[Tier]:
    return [unit.placement.parameters_tier for unit in engine_of(model).units]


def largest(*numbers: int) -> list[int]:
    """The largest of each of these numbers on any rank."""
    peaks = torch.tensor(numbers)
    torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
    found: list[int] = peaks.tolist()
    return found


def trained(work: Work, offload: Any) -> tuple[Outcome, int, int]:
    """A run, how many of its units have parameters on the device, and bytes of parameters there between steps."""
    model, adam = build(work, offload)
    with onefold.track_memory(model) as seen:
        losses = [step(model, adam, work, number) for number in range(3)]
        engine_of(model).updates.wait()
    there, held = parameter_tiers(model), onefold.memory(model).parameters
    states = zip(there, tiers_of(model), strict=True)
    assert (Tier.HOST, Tier.DEVICE) not in states, "the device has no parameters to update"
    assert held.measured == held.planned, "parameters on the device are planned to the byte"
    state, why = onefold.full_state_dict(model), onefold.placement(model).why
    found = Outcome(losses, state, seen.peak_bytes, tiers_of(model), [], why, [])
    return found, there.count(Tier.DEVICE), held.measured


def swept(work: Work, fills: list[float]) -> list[str]:
    """What was wrong with budgets between the smallest placement and the run without offload."""
    plain, low = train(work, None), train(work, SMALLEST)
    most, least = largest(plain.peak, low.peak)
    wrong, counts, held = [], [], []
    for fill in fills:
        budget = int(least + fill * (most - least)) + 64
        auto, there, nbytes = trained(work, onefold.Offload(optimizer="auto", device_bytes=budget))
        counts.append(there)
        held.append(nbytes)
        units = len(auto.tiers)
        if auto.peak > budget:
            wrong.append(f"{auto.peak} bytes of {budget}, of {least} to {most}: {auto.why}")
        wrong += [f"{name} differs with {budget} bytes" for name in differing(plain, auto)]
        away = f" ({units - there} in host memory)" if there < units else ""
        if f"parameters of {there} of {units} units stay on the device{away}: " not in auto.why and there < units:
            wrong.append(f"{there} units, but: {auto.why}")
    if any(more < less - PLACEHOLDERS for less, more in pairwise(held)):
        wrong.append(f"a larger budget had fewer bytes of parameters on the device: {held}")
    if counts[0] != 0 or counts[-1] != units or not any(0 < count < units for count in counts):
        wrong.append(f"budgets were to reach from none to all: {counts}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "work"),
    [
        (1, Work(depth=8, rows=1)),
        (2, Work(depth=8, rows=1, clip=True)),
        pytest.param(2, Work(depth=8, rows=1, precision="bf16", inside=True), marks=pytest.mark.soak),
    ],
)
def test_every_budget_above_the_smallest_placement_trains_within_it(ranks: int, work: Work) -> None:
    assert run_ranks(ranks, swept, work, [0.0, 0.15, 0.3, 1.2]) == [[]] * ranks


# -- what users say, the host and the disk -----------------------------------------------------------------------------


def said(folder: str) -> list[Any]:
    """With parameters="host" and a large budget: the tiers of parameters and of optimizer state. With a host that is
    too small for parameters: the same, after steps, what differs from the run without offload, and why; and the tiers
    of parameters after a smaller form of state has brought masters from disk to the host."""
    work = Work(depth=6, rows=1)
    told = build(work, onefold.Offload(optimizer="auto", parameters="host", device_bytes=1 << 30))[0]
    plain, low = train(work, None), train(work, SMALLEST)
    (budget,) = largest(low.peak + 16_000)
    spills = onefold.Offload(optimizer="auto", device_bytes=budget, host_bytes=60_000, path=folder)
    model, adam = build(work, spills)
    begun = parameter_tiers(model)
    losses = [step(model, adam, work, number) for number in range(3)]
    found = Outcome(losses, onefold.full_state_dict(model), 0, [], [], "", [])
    kept = onefold.placement(model)
    first, again = (set(parameter_tiers(told)), set(tiers_of(told))), build(work._replace(state="bf16"), spills)[0]
    second = parameter_tiers(model), tiers_of(model), differing(plain, found)
    return [*first, *second, kept.why, kept.parameter_tiers, parameter_tiers(again) == begun, tiers_of(again)]


def test_a_tier_that_was_given_holds_and_parameters_spill_to_disk(tmp_path: Any) -> None:
    for host, optimizer, kept, states, differs, why, by_name, again, off_disk in run_ranks(2, said, str(tmp_path)):
        assert host == {Tier.HOST} and optimizer == {Tier.HOST}, "as was said, though the device has room for all"
        assert Tier.DISK in kept and not differs and "on disk" in why
        away = [tier for tier in kept if tier is not Tier.DEVICE]
        assert away == sorted(away, key=list(Tier).index), "of those that left, the last units of forward are on disk"
        assert all(one is Tier.DEVICE or state is not Tier.DEVICE for one, state in zip(kept, states, strict=True))
        assert list(by_name.values()) == [tier.value for tier in kept]
        assert again and Tier.DISK in states and Tier.DISK not in off_disk, "only optimizer state has moved"


def too_little_host(folder: str) -> list[str]:
    """What is said where the host has no room: with state that may be on disk, and with state that may not."""
    offload = onefold.Offload(optimizer="auto", device_bytes=60_000, host_bytes=20_000, path=folder)
    found = []
    for state, inside in (("fp32", False), ("fp32", True), ("8bit", False)):
        work = Work(depth=6, rows=1, state=state, inside=inside)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                step(*build(work, offload), work, 0)
                found.append("; ".join(str(one.message) for one in heard if "host memory" in str(one.message)))
            except OffloadError as error:
                found.append(str(error))
    return found


def test_a_host_without_room_is_told_and_what_helps(tmp_path: Any) -> None:
    ((waits, inside, small),) = run_ranks(1, too_little_host, str(tmp_path))
    for said in (waits, inside):
        assert "a step may take" in said and "each rank can have 20.0 kB" in said
    assert "step_in_backward=True" in waits and "step_in_backward" not in inside
    assert "does not fit on the device" in small and "step_in_backward=True" in small
    assert "path" not in small and "smaller state" not in small, "neither helps with 8 bits"


# -- what does not fit -------------------------------------------------------------------------------------------------


def refused(budget: int) -> list[str]:
    """What stages 3, 2 and 1 say of a budget below one unsharded unit."""
    found = []
    for stage in (3, 2, 1):
        try:
            build(Work(stage=stage, depth=4), onefold.Offload(optimizer="auto", device_bytes=budget))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_budget_below_one_unsharded_unit_is_refused_with_what_to_choose() -> None:
    """The largest unit of a block of width 32 is a matrix of 32 x 64 elements in fp32."""
    for three, *others in run_ranks(2, refused, 8000):
        assert "device_bytes=8000" in three and "largest unsharded unit takes 8.2 kB" in three
        assert "give at least 8" in three and "bucket_bytes=" in three
        for stage, told in zip((2, 1), others, strict=True):
            assert f"replicated on every rank at stage={stage}; use stage=3" in told and "give at least" in told


def staged(budgets: list[int]) -> list[tuple[int | str, set[Tier], str]]:
    """With stage="auto" and each budget: the stage, the tiers of parameters, and why."""
    found = []
    for budget in budgets:
        onefold.init()
        layers, offload = (
            nn.Sequential(*(Residual(32) for _ in range(8))),
            onefold.Offload(optimizer="auto", device_bytes=budget),
        )
        model = onefold.shard(layers, stage="auto", units=(Residual,), bucket_bytes=4096, offload=offload)
        found.append(
            (engine_of(model).resolved.settings.stage, set(parameter_tiers(model)), onefold.placement(model).why)
        )
    return found


def test_an_automatic_stage_is_chosen_by_the_budget() -> None:
    small, large = run_ranks(2, staged, [60_000, 1 << 30])[0]
    assert small[:2] == (3, {Tier.HOST}) and "stage 3: " in small[2] and "parameters of 0 of" in small[2]
    assert large[:2] == (1, {Tier.DEVICE}) and "stage 1: " in large[2]


def crowded(rows: int, filled: float) -> tuple[float, list[str]]:
    """The share of a budget that activations take, and what is wrong with a run within it. `filled`: 0.95 leaves what a
    decision leaves; 1 is the peak of the smallest placement."""
    work = Work(depth=8, rows=rows)
    (least,) = largest(train(work, SMALLEST).peak)
    budget = int((least + 12_000) / 0.95) if filled < 1 else least + 64
    plain, auto = train(work, None), train(work, onefold.Offload(optimizer="auto", device_bytes=budget))
    above = [f"{auto.peak} of {budget}: {auto.why}"] * (auto.peak > budget)
    moves = any("parameters of" in said for said in auto.said) or "a step takes" in auto.why
    return rows * ACTIVATIONS / budget, [*differing(plain, auto), *above, *["no parameters moved"] * (not moves)]


@pytest.mark.parametrize(
    ("ranks", "rows", "filled", "share"), [(1, 16, 0.95, 0.6), (2, 64, 0.95, 0.6), (1, 128, 1, 1.0), (2, 256, 1, 1.0)]
)
def test_parameters_leave_room_for_activations_that_take_most_of_a_budget(
    ranks: int, rows: int, filled: float, share: float
) -> None:
    """Also where parameters take a small share of it."""
    for found, wrong in run_ranks(ranks, crowded, rows, filled):
        assert found > share and not wrong


# -- building ----------------------------------------------------------------------------------------------------------


def from_meta() -> list[str]:
    """Of a model on the meta device, what differs from one whose parameters stay on the device."""
    found = []
    for offload in (None, onefold.Offload(optimizer="auto", device_bytes=40_000)):
        onefold.init()
        with torch.device("meta"):
            layers = nn.Sequential(*(Residual(32) for _ in range(8)))
        model = onefold.shard(layers, stage=3, units=(Residual,), bucket_bytes=4096, offload=offload)
        found.append((onefold.full_state_dict(model), set(parameter_tiers(model))))
    (plain, _), (auto, tiers) = found
    return [*(name for name in plain if not torch.equal(plain[name], auto[name])), *["device"] * (tiers != {Tier.HOST})]


def test_a_model_on_meta_is_built_unit_by_unit_in_host_memory() -> None:
    assert run_ranks(1, from_meta) == [[]]


def test_parameters_that_are_sharded_later_are_not_moved_with_the_model() -> None:
    """The meta device stands for one that has no room for them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    move(model, torch.device("meta"), later={"0.weight"})
    where = {name: tensor.device.type for name, tensor in model.state_dict(keep_vars=True).items()}
    assert where.pop("0.weight") == "cpu" and set(where.values()) == {"meta"}
