"""Offload(optimizer="auto"): a budget that holds, activations included, and state that moves without changing a bit."""

from __future__ import annotations

import random
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.cost.automatic import ADAM, host_need
from onefold.errors import PlacementWarning
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual

STEPS = 3
HOST_BYTES = 260_000  # for a third of the state of ten blocks, and buffers


class Work(NamedTuple):
    """A small model and how it trains."""

    width: int = 32
    depth: int = 6
    rows: int = 64  # of a micro-batch
    micro: int = 1
    stage: int = 3
    precision: Any = "fp32"
    inside: bool = False
    clip: bool = False
    cls: Any = torch.optim.AdamW
    state: str = "fp32"
    activations: str = "keep"


class Outcome(NamedTuple):
    losses: list[float]
    params: dict[str, Tensor]
    peak: int  # bytes on the device
    tiers: list[Tier]  # of each unit's optimizer state
    said: list[str]  # warnings
    why: str
    numels: list[int]  # of units


def build(work: Work, offload: Any) -> tuple[Any, onefold.Optimizer]:
    onefold.init()
    torch.manual_seed(0)
    layers = nn.Sequential(*(Residual(work.width) for _ in range(work.depth)))
    fields: dict[str, Any] = {
        "stage": work.stage,
        "precision": work.precision,
        "activations": work.activations,
        "units": (Residual,),
    }
    model = onefold.shard(layers, offload=offload, bucket_bytes=4 * work.width**2, **fields)
    return model, onefold.Optimizer(model, work.cls, lr=1e-2, step_in_backward=work.inside, state=work.state)


def step(model: Any, adam: onefold.Optimizer, work: Work, number: int, micro: int | None = None) -> float:
    dtype = engine_of(model).resolved.precision.compute
    total, micro = 0.0, micro or work.micro
    for part in range(micro):
        generator = torch.Generator().manual_seed(100 * number + part)
        x = torch.randn(work.rows, work.width, generator=generator).to(dtype)
        with onefold.accumulate(model) if part < micro - 1 else nullcontext():
            loss = model(x).float().square().mean() / micro
            loss.backward()
        total += loss.item()
        del loss
    if work.clip:
        adam.clip_grad_norm(0.01)
    adam.step()
    adam.zero_grad()
    return total


def tiers_of(model: Any) -> list[Tier]:
    return [unit.placement.optimizer_tier for unit in engine_of(model).units]


def outcome(model: Any, losses: list[float], peak: int, heard: list[warnings.WarningMessage]) -> Outcome:
    said = [str(one.message) for one in heard if issubclass(one.category, PlacementWarning)]
    numels = [unit.layout.numel for unit in engine_of(model).units]
    state, why = onefold.full_state_dict(model), onefold.placement(model).why
    return Outcome(losses, state, peak, tiers_of(model), said, why, numels)


def train(work: Work, offload: Any, *, tracked: bool = True) -> Outcome:
    model, adam = build(work, offload)
    with (
        warnings.catch_warnings(record=True) as heard,
        onefold.track_memory(model) if tracked else nullcontext() as seen,
    ):
        warnings.simplefilter("always")
        losses = [step(model, adam, work, number) for number in range(STEPS)]
        engine_of(model).updates.wait()
    return outcome(model, losses, seen.peak_bytes if seen is not None else 0, heard)


def differing(one: Outcome, other: Outcome) -> list[str]:
    names = [name for name in one.params if not torch.equal(one.params[name], other.params[name])]
    return names + ["losses"] * (one.losses != other.losses)


# -- a budget that holds ----------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Work, float, bool]:
    """A random work, how full the device may be (0: as with all optimizer state elsewhere, 1: with all state there; at
    stage 3 also -1: as with all parameters elsewhere too), and whether a disk may be used."""
    draw = random.Random(seed)
    inside = draw.random() < 0.3
    narrow = draw.random() < 0.15
    work = Work(
        width=draw.choice([16, 32, 48]), depth=draw.randint(3, 10), rows=draw.choice([1, 16, 64, 256]),
        micro=1 if inside else draw.choice([1, 1, 2]), stage=draw.choice([1, 2, 3, 3]), inside=inside,
        precision="bf16" if narrow else "fp32", clip=not inside and draw.random() < 0.3,
        cls=draw.choice([torch.optim.AdamW, torch.optim.AdamW, torch.optim.Adagrad]),
        activations=draw.choice(["keep", "checkpoint"]),
    )  # fmt: skip
    fill, disk = draw.uniform(0.05, 1.3), draw.random() < 0.3
    return work, draw.uniform(-1, 0) if work.stage == 3 and draw.random() < 0.4 else fill, disk


class Bounds(NamedTuple):
    """What a work takes on the fullest device without offload, and with all optimizer state on the host; if it was
    looked at, with all parameters there too."""

    plain: Outcome
    most: int
    least: int
    lowest: int = 0

    def budget(self, fill: float) -> int:
        if fill < 0:
            return int(self.lowest + (1 + fill) * max(self.least - self.lowest, 0)) + 64
        return int((self.least + fill * max(self.most - self.least, 0)) / 0.95) + 4096


def bounds(work: Work, *, below: bool = False) -> Bounds:
    plain, least = train(work, None), train(work, onefold.Offload(optimizer="host"))
    peaks = [plain.peak, least.peak]
    if below:
        peaks.append(train(work, onefold.Offload(optimizer="host", parameters="host")).peak)
    largest = torch.tensor(peaks)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return Bounds(plain, *largest.tolist())


def within_budget(seeds: list[int]) -> list[str]:
    """What was wrong in trials with these seeds."""
    found = []
    for seed in seeds:
        work, fill, disk = drawn(seed)
        known = bounds(work, below=fill < 0)
        plain, budget = known.plain, known.budget(fill)
        with tempfile.TemporaryDirectory() as folder:
            path: dict[str, Any] = {"path": folder, "host_bytes": 1 << 18} if disk else {}
            auto = train(work, onefold.Offload(optimizer="auto", device_bytes=budget, **path))
        if auto.peak > budget:
            peaks = f"{known.lowest}, {known.least} and {known.most}"
            found.append(f"{seed}: {auto.peak} bytes of {budget} ({peaks}), {work}: {auto.why}")
        found += [f"{seed}: {name} differs, {work}" for name in differing(plain, auto)]
    return found


PARTS = [(ranks, part) for part in range(10) for ranks in (1, 2)]  # of a soak, which may be ended after any of them


@pytest.mark.trials_of("budgets")
@pytest.mark.parametrize(
    ("ranks", "part"), [pytest.param(*one, marks=[pytest.mark.soak] * bool(one[1])) for one in PARTS]
)
def test_training_stays_within_any_budget_that_some_placement_fits(ranks: int, part: int, soak: Any) -> None:
    first = 1000 * ranks + 10 * part
    for seed in range(first, first + soak.number(4 - ranks, 10)):
        assert run_ranks(ranks, within_budget, [seed], timeout_s=600) == [[]] * ranks
        soak.tried()


def test_buffers_that_steps_keep_from_one_to_the_next_count_from_the_first_forward_on() -> None:
    """Works whose fullest instant is before their first gradient is complete, beside buffers of the step before."""
    assert run_ranks(2, within_budget, [2052, 2069]) == [[], []]


def filled(work: Work, fills: list[float]) -> list[tuple[dict[int, list[Tier]], list[str], bool, str]]:
    """With each budget: where state is, by the size of units, what differs from the run without offload, whether it was
    within the budget, and what placement() tells."""
    found, known = [], bounds(work)
    for budget in map(known.budget, fills):
        auto = train(work, onefold.Offload(optimizer="auto", device_bytes=budget))
        by_size = {size: [t for t, n in zip(auto.tiers, auto.numels, strict=True) if n == size] for size in auto.numels}
        found.append((by_size, differing(known.plain, auto), auto.peak <= budget, auto.why))
    return found


@pytest.mark.parametrize(
    ("stage", "ranks", "inside", "precision"),
    [(1, 2, False, "fp32"), (3, 2, True, "fp32"), (3, 1, False, "fp32"), (3, 1, False, "bf16")],
)
def test_the_device_is_filled_from_the_front_to_the_same_bits(
    stage: int, ranks: int, inside: bool, precision: str
) -> None:
    """Budgets that no unit, some of them and all of them fit. Of units of one size the first of forward stay."""
    work = Work(stage=stage, inside=inside, clip=not inside, rows=16, depth=4, precision=precision)
    none, some, every = run_ranks(ranks, filled, work, [0.0, 0.6, 2.0])[0]
    elements = []  # of units whose state is on the device
    for by_size, differs, within, why in (none, some, every):
        assert not differs and within, (differs, why)
        for tiers in by_size.values():
            there = [tier is Tier.DEVICE for tier in tiers]
            assert there == sorted(there, reverse=True), "units of the front stay"
        tiers = [tier for of_size in by_size.values() for tier in of_size]
        elements.append(sum(size * tiers.count(Tier.DEVICE) for size, tiers in by_size.items()))
        assert f"{tiers.count(Tier.DEVICE)} of {len(tiers)} units stays on the device" in why
    few, more, most = elements
    assert few < more < most and few < most / 3 and set(tiers) == {Tier.DEVICE}


def made_in_backward(work: Work, host_bytes: int, folder: str) -> tuple[int, float, list[str], list[str]]:
    """Units that the device updates in the first backward, the share of the budget at the peak, what was said, and what
    differs from the run without offload. The host has no room for what would wait in it for the end of that step."""
    known = bounds(work)
    budget, there = known.budget(0.7), list[int]()
    offload = onefold.Offload(optimizer="auto", device_bytes=budget, host_bytes=host_bytes, path=folder)
    model, adam = build(work, offload)
    model.register_forward_hook(
        lambda *_: there.append(sum(not unit.updated_on_host for unit in engine_of(model).units))
    )
    step(model, adam, work, 0)
    auto = train(work, offload)
    return there[0], auto.peak / budget, auto.said, differing(known.plain, auto)


@pytest.mark.parametrize(("state", "host_bytes"), [("8bit", 300_000), ("bf16", 400_000)])
def test_state_that_the_first_backward_makes_counts_from_the_first_forward_on(
    state: str, host_bytes: int, tmp_path: Any
) -> None:
    """The next forward has that state beside all activations; the first had not."""
    work = Work(depth=24, rows=256, stage=2, inside=True, precision="bf16", state=state)
    there, share, said, differs = run_ranks(1, made_in_backward, work, host_bytes, str(tmp_path))[0]
    assert there > 20 and share <= 0.95 and not said and not differs, (there, share, said, differs)


# -- what happens later -----------------------------------------------------------------------------------------------


def accumulated(work: Work) -> tuple[list[str], list[Tier], list[str], bool]:
    """A step of one micro-batch, then steps of three, whose sums take more memory: what was said, where state is, what
    differs from the run without offload, and whether the last step was within the budget."""
    budget = bounds(work).budget(0.7)
    results = []
    for offload in (None, onefold.Offload(optimizer="auto", device_bytes=budget)):
        model, adam = build(work, offload)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            losses = [step(model, adam, work, number, micro=3 if number else 1) for number in range(3)]
            with onefold.track_memory(model) as seen:
                losses.append(step(model, adam, work, 3, micro=3))
        results.append(outcome(model, losses, seen.peak_bytes, heard))
    plain, auto = results
    return auto.said, auto.tiers, differing(plain, auto), auto.peak <= budget


@pytest.mark.parametrize(("ranks", "precision"), [(1, "bf16"), (2, "fp32")])
def test_a_step_that_takes_more_moves_state_off_the_device_and_says_so(ranks: int, precision: str) -> None:
    said, tiers, differs, within = run_ranks(ranks, accumulated, Work(precision=precision, depth=5, rows=4))[0]
    assert not differs and within
    assert len(said) == 1 and "was moved from the device to host" in said[0], said
    assert Tier.DEVICE in tiers or "of 0 of" in said[0]


def left_for_disk(work: Work, folder: str) -> tuple[list[Tier], list[Tier], int, list[str]]:
    """Where state was after the first step, and after others of three micro-batches, whose sums take more memory; bytes
    that it needs in host memory then; and what differs from the run without offload."""
    budget = bounds(work).budget(0.7)
    offload = onefold.Offload(optimizer="auto", device_bytes=budget, host_bytes=HOST_BYTES, path=folder)
    found = []
    for where in (None, offload):
        model, adam = build(work, where)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            losses = [step(model, adam, work, 0)]
            before = tiers_of(model)
            losses += [step(model, adam, work, number, micro=3) for number in range(1, STEPS)]
        found.append(outcome(model, losses, 0, heard))
    resolved = engine_of(model).resolved
    sizes = [unit.size(0, resolved.precision) for unit in resolved.units]
    needed = host_need(sizes, [unit.placement for unit in resolved.units], tiers_of(model), cost=ADAM)
    return before, tiers_of(model), needed, differing(*found)


def test_state_that_leaves_the_device_goes_to_disk_where_the_host_is_full(tmp_path: Any) -> None:
    """Also state that was in host memory: once anything is on disk, its buffers need room there."""
    work = Work(depth=10, rows=4, precision="bf16")
    before, after, needed, differs = run_ranks(1, left_for_disk, work, str(tmp_path))[0]
    assert set(before) == {Tier.DEVICE, Tier.HOST} and set(after) == set(Tier)
    assert after.count(Tier.DEVICE) < before.count(Tier.DEVICE)
    assert needed <= HOST_BYTES and not differs


class Continued(NamedTuple):
    """A run that is saved and loaded into a new model before its first step."""

    differs: list[str]  # from the run that goes on
    loaded: list[Tier]  # where state was after the load
    after: list[Tier]  # and after the next step
    peaks: list[int]  # of the load, and of the next two steps
    budget: int


def continued(work: Work, folder: str, fill: float, host: dict[str, Any]) -> Continued:
    budget = bounds(work).budget(fill)
    offload = onefold.Offload(optimizer="auto", device_bytes=budget, **host)
    model, adam = build(work, offload)
    for number in range(2):
        step(model, adam, work, number)
    onefold.save(folder, model, adam)
    step(model, adam, work, 2)
    again, other = build(work, offload)
    peaks, tiers = [], []
    for what in (lambda: onefold.load(folder, again, other), *[lambda: step(again, other, work, 2)] * 2):
        if len(peaks) == 2:
            wanted, found = onefold.full_state_dict(model), onefold.full_state_dict(again)
        with onefold.track_memory(again) as seen:
            what()
            engine_of(again).updates.wait()
        peaks.append(seen.peak_bytes)
        tiers.append(tiers_of(again))
    differs = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    return Continued(differs, tiers[0], tiers[1], peaks, budget)


@pytest.mark.parametrize(
    ("ranks", "work", "kept"),
    [
        (2, Work(rows=128), {Tier.HOST}),
        (2, Work(rows=128, inside=True), {Tier.HOST, Tier.DISK}),
        (1, Work(rows=128), {Tier.HOST, Tier.DISK}),
        (1, Work(rows=128, stage=2), {Tier.HOST, Tier.DISK}),
        (2, Work(rows=128, state="bf16"), {Tier.DEVICE, Tier.HOST}),
    ],
)
def test_state_that_is_loaded_before_the_first_step_leaves_room_for_activations(
    ranks: int, work: Work, kept: set[Tier], tmp_path: Any
) -> None:
    """It waits in host memory for that step, and on disk if the host is too short for all of it. State in a small form,
    which is not kept on disk, is on the device then, of as few units as can be."""
    host_bytes = (300_000 if work.state == "fp32" else 160_000) // ranks
    host = {"path": str(tmp_path), "host_bytes": host_bytes} if len(kept) > 1 else {}
    for found in run_ranks(ranks, continued, work, str(tmp_path / "saved"), 0.5, host):
        assert not found.differs and max(found.peaks) <= found.budget, (found.peaks, found.budget)
        assert set(found.loaded) == kept and Tier.DEVICE in found.after and set(found.after) != {Tier.DEVICE}
