"""Offload(optimizer="auto") on a GPU: what fits trains, near the run without offload, within the device's memory.

Giants (7B to 32B parameters; minutes, and most of a GPU with 140 GB): python -m tests.gpu.test_auto_gpu 7b 14b 20b, and
python -m tests.gpu.test_auto_gpu 32b inside, for which a host with 126 GiB has no room otherwise; path=DIR adds a disk.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import onefold
from onefold.cost.shapes import Shape
from onefold.errors import PlacementWarning
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from onefold.train.run.model import GPT
from tests.harness import run_ranks
from tests.models.trainer_gpt import initialised_gpt, next_tokens, relative_distance

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=6, hidden=256, heads=4, seq=64, vocab=512)
WIDE = Shape(layers=8, hidden=512, heads=4, seq=16, vocab=512)  # 50 MB of parameters in bf16, few activations
# 134 MB of logits in fp32, 185 MB of parameters in bf16
LOGITS = Shape(layers=24, hidden=512, heads=4, seq=512, vocab=16384)
DEEP = Shape(layers=24, hidden=512, heads=4, seq=16, vocab=512)  # 152 MB of parameters in bf16
STEPS = 4


class Run(NamedTuple):
    losses: list[float]
    params: dict[str, Any]
    peak: int  # bytes that tensors took beyond those that were there before
    tiers: list[Tier]
    said: list[str]


def train(
    offload: Any,
    *,
    stage: int = 3,
    inside: bool = False,
    rows: tuple[int, ...] = (4,) * STEPS,
    shape: Shape = SHAPE,
    optimizer: type[torch.optim.AdamW] = torch.optim.AdamW,
) -> Run:
    torch.cuda.set_device(0)
    onefold.init()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = onefold.shard(
        initialised_gpt(shape).cuda(), stage=stage, precision="bf16", offload=offload, bucket_bytes=1 << 18
    )
    adam = onefold.Optimizer(model, optimizer, lr=1e-3, step_in_backward=inside)
    losses, peaks = [], []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for number, count in enumerate(rows):
            generator = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
            tokens = torch.randint(0, shape.vocab, (count, shape.seq), generator=generator).cuda()
            torch.cuda.reset_peak_memory_stats()
            loss = model(*next_tokens(tokens))
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses.append(loss.item())
            peaks.append(torch.cuda.max_memory_allocated())
    tiers = [unit.placement.optimizer_tier for unit in engine_of(model).units]
    said = [str(one.message) for one in heard if issubclass(one.category, PlacementWarning)]
    return Run(losses, onefold.full_state_dict(model), max(peaks) - before, tiers, said)


def filled(stage: int, inside: bool, share: float) -> tuple[float, int, int, set[str]]:
    """How far parameters are from the run without offload, of how far they have moved; bytes at the peak, the budget,
    and the tiers."""
    train(None, stage=stage, inside=inside)  # what cuBLAS keeps is there from now on
    there, away = train(None, stage=stage, inside=inside), train("host", stage=stage, inside=inside)
    gc.collect()  # their models
    before = torch.cuda.memory_allocated()
    budget = int((away.peak + share * max(there.peak - away.peak, 0) + before + (8 << 20)) / 0.95)
    auto = train(onefold.Offload(optimizer="auto", device_bytes=budget), stage=stage, inside=inside)
    far = relative_distance(there.params, auto.params, initialised_gpt(SHAPE).state_dict())
    return far, auto.peak + before, budget, {tier.value for tier in auto.tiers}


@pytest.mark.parametrize(("stage", "inside"), [(3, False), (3, True), (2, False)])
def test_a_budget_holds_and_updates_are_near_those_of_the_device(stage: int, inside: bool) -> None:
    ((far, peak, budget, tiers),) = run_ranks(1, filled, stage, inside, 0.6, timeout_s=180)
    assert far < 0.02 and peak <= budget, (far, peak, budget, tiers)
    assert "host" in tiers


def fullest_at_the_logits() -> tuple[int, int, set[str]]:
    """Bytes at the peak and of the budget, and tiers, of a model that takes the most when it computes its loss."""
    train(None, shape=LOGITS, inside=True)  # what cuBLAS keeps is there from now on
    there = train(None, shape=LOGITS, inside=True)
    away = train("host", shape=LOGITS, inside=True)
    gc.collect()  # their models
    before = torch.cuda.memory_allocated()
    budget = int((away.peak + 0.7 * (there.peak - away.peak) + before) / 0.95)
    auto = train(onefold.Offload(optimizer="auto", device_bytes=budget), shape=LOGITS, inside=True)
    return auto.peak + before, budget, {tier.value for tier in auto.tiers}


def test_gradients_that_wait_for_host_updates_take_no_room_before_they_are_there() -> None:
    """No gradient waits while the loss is computed, the fullest instant of this model: state fills that room."""
    ((peak, budget, tiers),) = run_ranks(1, fullest_at_the_logits, timeout_s=180)
    assert 0.85 * budget <= peak <= budget and tiers == {"device", "host"}, (peak, budget, tiers)


class OnSlowHost(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if not any(param.is_cuda for group in self.param_groups for param in group["params"]):
            time.sleep(0.02)  # an update that takes long
        return super().step(closure)


def beside_waiting_gradients() -> tuple[int, int, list[tuple[int, int]]]:
    """Of a model with many units, of which the host updates most in the first backward: how many there are, bytes of
    the budget, and with a fast and a slow host the bytes at the peak and the units that the device updates."""
    train(None, shape=DEEP, inside=True)  # what cuBLAS keeps is there from now on
    there, away = train(None, shape=DEEP, inside=True), train("host", shape=DEEP, inside=True)
    gc.collect()  # their models
    before = torch.cuda.memory_allocated()
    budget = int((away.peak + 0.3 * (there.peak - away.peak) + before) / 0.95)
    found = []
    for optimizer in (torch.optim.AdamW, OnSlowHost):
        offload = onefold.Offload(optimizer="auto", device_bytes=budget)
        auto = train(offload, shape=DEEP, inside=True, optimizer=optimizer)
        found.append((auto.peak + before, auto.tiers.count(Tier.DEVICE)))
        units = len(auto.tiers)
        del auto
        gc.collect()
    return units, budget, found


def test_gradients_that_wait_for_a_slow_host_in_the_first_step_count_once() -> None:
    """As many wait as may in any step: the plan has them already. A fast host leaves as much room."""
    ((units, budget, ((fast, there), (slow, beside))),) = run_ranks(1, beside_waiting_gradients, timeout_s=180)
    assert max(fast, slow) <= budget and there < units, (budget, fast, slow, there, units)
    assert abs(there - beside) <= 1, (units, budget, fast, slow, there, beside)


def all_of_it() -> tuple[set[str], bool]:
    """Without a budget a small model fits: all of its state is on the device, and bits are those without offload."""
    there, auto = train(None), train("auto")
    same = all(torch.equal(there.params[name], auto.params[name]) for name in there.params)
    return {tier.value for tier in auto.tiers}, same


def test_what_fits_is_not_offloaded() -> None:
    assert run_ranks(1, all_of_it, timeout_s=180) == [({"device"}, True)]


def longer_batches() -> tuple[list[str], int, int]:
    away = train("host")
    gc.collect()
    budget = int((away.peak + torch.cuda.memory_allocated() + (16 << 20)) / 0.95)
    run = train(onefold.Offload(optimizer="auto", device_bytes=budget), rows=(4, 4, 64, 64))
    return run.said, run.tiers.count(Tier.DEVICE), len(run.tiers)


def test_state_leaves_the_device_when_a_batch_is_longer() -> None:
    ((said, there, units),) = run_ranks(1, longer_batches, timeout_s=180)
    assert len(said) >= 1 and "was moved from the device" in said[0] and there < units


def longer_within() -> tuple[float, int, int]:
    """Batches that become longer: how far parameters are from the run without offload, and the peak of all steps beside
    a budget that these batches do not fit with the state that the first steps leave on the device."""
    rows = (4, 4, 32, 32)
    train(None, rows=rows)  # what cuBLAS keeps is there from now on
    there, away = train(None, rows=rows), train(onefold.Offload(optimizer="host", parameters="host"), rows=rows)
    gc.collect()  # their models
    before = torch.cuda.memory_allocated()
    budget = int((away.peak + 0.3 * max(there.peak - away.peak, 0) + before + (8 << 20)) / 0.95)
    auto = train(onefold.Offload(optimizer="auto", device_bytes=budget), rows=rows)
    far = relative_distance(there.params, auto.params, initialised_gpt(SHAPE).state_dict())
    return far, auto.peak + before, budget


def test_the_step_that_is_longer_than_all_before_is_within_the_budget_too() -> None:
    ((far, peak, budget),) = run_ranks(1, longer_within, timeout_s=180)
    assert far < 0.02 and peak <= budget, (far, peak, budget)


def below_parameters() -> tuple[float, int, int, set[str], int, int]:
    """With a budget that not all parameters fit: how far they are from the run without offload, bytes at the peak, the
    budget, and the tiers of parameters; and what shard() took at most to move a model from the CPU, of how much."""
    away = train(onefold.Offload(optimizer="host", parameters="host"), shape=WIDE)
    there = train(None, shape=WIDE)
    gc.collect()  # their models
    before = torch.cuda.memory_allocated()
    budget = away.peak + before + (8 << 20)
    auto = train(onefold.Offload(optimizer="auto", device_bytes=budget), shape=WIDE)
    far = relative_distance(there.params, auto.params, initialised_gpt(WIDE).state_dict())
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    empty, model = torch.cuda.memory_allocated(), GPT(WIDE)
    offload = onefold.Offload(optimizer="auto", device_bytes=budget)
    onefold.shard(model, stage=3, precision="bf16", offload=offload, bucket_bytes=1 << 18, device="cuda")
    tiers = set(onefold.placement(model).parameter_tiers.values())
    moved = torch.cuda.max_memory_allocated() - empty
    return far, auto.peak + before, budget, tiers, moved, 4 * WIDE.numel


def test_a_budget_below_the_parameters_holds_and_they_are_never_whole_on_the_device() -> None:
    ((far, peak, budget, tiers, moved, whole),) = run_ranks(1, below_parameters, timeout_s=180)
    assert far < 0.02 and peak <= budget, (far, peak, budget)
    assert "host" in tiers and moved < whole / 2, (tiers, moved, whole)


# -- giants -----------------------------------------------------------------------------------------------------------


class Giant(NamedTuple):
    shape: Shape
    batch: int
    state: str


GIANTS = {
    "7b": Giant(Shape(layers=32, hidden=4096, heads=32, seq=1024, vocab=50304), 16, "fp32"),
    "14b": Giant(Shape(layers=48, hidden=5120, heads=40, seq=1024, vocab=50304), 8, "fp32"),
    "20b": Giant(Shape(layers=44, hidden=6144, heads=48, seq=1024, vocab=50304), 8, "bf16"),
    "32b": Giant(Shape(layers=64, hidden=6400, heads=50, seq=1024, vocab=50304), 4, "8bit"),
}


def giant(name: str, inside: bool, path: str | None, steps: int = 3) -> None:
    """Trains a few steps with activations="checkpoint" and prints where state is, times and peaks; what fits neither
    the device nor the host is in files of the folder `path`."""
    shape, batch, state = GIANTS[name]
    torch.cuda.set_device(0)
    onefold.init()
    with torch.device("meta"):
        model = GPT(shape)
    split = onefold.Precision(compute="bf16", master="split")
    onefold.shard(
        model, stage=3, precision=split, offload=onefold.Offload(optimizer="auto", path=path),
        activations="checkpoint", bucket_bytes=128 << 20, device="cuda",
    )  # fmt: skip
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4, step_in_backward=inside, state=state)  # type: ignore[arg-type]
    count = sum(unit.layout.used_numel for unit in engine_of(model).units)
    for number in range(steps):
        tokens = torch.randint(0, shape.vocab, (batch, shape.seq), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(tokens, tokens)
        loss.backward()
        adam.step()
        adam.zero_grad()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"{name} {count / 1e9:.2f}B step {number}: loss {loss.item():.3f}, {took:.2f} s, {peak / 2**30:.1f} GiB "
              f"of tensors, {kept / 2**30:.1f} reserved", flush=True)  # fmt: skip
    print(onefold.placement(model).why)
    print(onefold.memory(model), flush=True)


if __name__ == "__main__":
    for one in [name for name in sys.argv[1:] if name in GIANTS]:
        giant(one, "inside" in sys.argv, next((word[5:] for word in sys.argv if word.startswith("path=")), None))
        gc.collect()
        torch.cuda.empty_cache()
