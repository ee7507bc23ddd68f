"""fp16: when gradients overflow on any rank, every rank skips the step and nothing changes but the scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold import LossScale
from onefold.optim import finite
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.parity.training import same_bits

STAGES = (0, 1, 2, 3)
WHO = {  # (step, rank) -> overflow
    "nobody": lambda step, rank: False,
    "one rank": lambda step, rank: step == 1 and rank == 1,
    "all ranks": lambda step, rank: step == 1,
    "by turns": lambda step, rank: step % 2 == 1 and rank == step // 2 % 2,
    "rank 0 in the first step": lambda step, rank: step == 0 and rank == 0,
}


def build(stage: int, scale: LossScale, **fields: Any) -> tuple[nn.Module, onefold.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    model = onefold.shard(model, stage=stage, precision="fp16", bucket_bytes=600)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, loss_scale=scale, **fields)


def snapshot(model: nn.Module, optimizer: onefold.Optimizer) -> list[Tensor]:
    """All this rank holds of parameters, masters and moments, step counts included."""
    with onefold.full_parameters(model):
        values = [p.detach().clone() for p in model.parameters()]
    masters = [t.clone() for unit in engine_of(model).units for t in unit.master.tensors()]
    return values + masters + [t.clone() for t in optimizer.state_tensors()]


def loss_of(model: nn.Module, step: int, overflows: bool) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return model(x).float().square().mean() * (1e9 if overflows else 1.0)


def train(stage: int, who: str, clip: bool, micro: int = 1, **settings: Any) -> dict[str, Any]:
    model, adam = build(stage, LossScale(initial=2.0**8, growth_interval=3), **settings)
    schedule = onefold.Scheduler(adam, torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    rank, unchanged, scales, stepped, rates = dist.get_rank(), [], [], [], []
    for step in range(6):
        before = snapshot(model, adam)
        for part in range(micro - 1):
            with onefold.accumulate(model):
                adam.backward(loss_of(model, step + 100 * part, WHO[who](step, rank) and part == 0))
        adam.backward(loss_of(model, step, WHO[who](step, rank) and micro == 1))
        if clip:
            adam.clip_grad_norm(0.1)
        adam.step()
        adam.zero_grad()
        schedule.step()
        after = snapshot(model, adam)
        unchanged.append(len(before) == len(after) and all(map(same_bits, before, after)))
        scales.append(adam.loss_scale)
        stepped.append(adam.stepped)
        rates.append(adam.param_groups[0]["lr"])
    return {
        "unchanged": unchanged, "stepped": stepped, "scales": scales, "skipped": adam.skipped, "rates": rates,
        "params": snapshot(model, adam)[: len(list(model.parameters()))],
    }  # fmt: skip


@pytest.mark.parametrize(("who", "clip"), thinned(WHO, [False, True]))
def test_overflow_anywhere_skips_the_step_everywhere(who: str, clip: bool) -> None:
    expected = [not any(WHO[who](step, rank) for rank in range(2)) for step in range(6)]
    first = None
    for stage in STAGES:
        everyone = run_ranks(2, train, stage, who, clip)
        for seen in everyone:
            assert seen["stepped"] == expected, f"stage {stage}"
            assert seen["unchanged"] == [not stepped for stepped in expected], "a skipped step changed something"
            assert seen["skipped"] == expected.count(False)
            assert [rate * 2 ** sum(expected[: i + 1]) for i, rate in enumerate(seen["rates"])] == [1e-2] * 6
            assert seen["scales"] == everyone[0]["scales"]
            first = first or seen
            assert all(map(same_bits, seen["params"], first["params"])), f"stage {stage}: other bits"
    scale, run = 2.0**8, 0
    for stepped, seen_scale in zip(expected, first["scales"], strict=True):
        run = run + 1 if stepped else 0
        scale = scale / 2 if not stepped else scale * 2 if run == 3 else scale
        run %= 3
        assert seen_scale == scale


def train_with_a_flag_on_the_device(stage: int, who: str, clip: bool) -> dict[str, Any]:
    """As on CUDA: the host reads the flag after the step, and what was written is taken back."""
    before = set(finite.FLAG_STAYS_ON)
    finite.FLAG_STAYS_ON.add("cpu")
    try:
        found = train(stage, who, clip, amsgrad=True)  # the CPU's own kernel reads no flag
    finally:
        finite.FLAG_STAYS_ON.intersection_update(before)
    return found


@pytest.mark.parametrize(
    ("stage", "who", "clip"), [(0, "one rank", True), (3, "by turns", False), (3, "rank 0 in the first step", True)]
)
def test_a_flag_that_stays_on_the_device_gives_the_same_steps_scales_and_bits(stage: int, who: str, clip: bool) -> None:
    on_host = run_ranks(2, train, stage, who, clip, amsgrad=True)
    on_device = run_ranks(2, train_with_a_flag_on_the_device, stage, who, clip)
    for wanted, seen in zip(on_host, on_device, strict=True):
        assert all(map(same_bits, seen.pop("params"), wanted.pop("params"))) and seen == wanted


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_an_accumulated_micro_batch_counts(stage: int) -> None:
    for seen in run_ranks(2, train, stage, "one rank", True, micro=3):
        assert seen["stepped"] == [True, False, True, True, True, True]
        assert seen["unchanged"] == [not stepped for stepped in seen["stepped"]]


def explode(stage: int) -> None:
    model, adam = build(stage, LossScale(initial=4.0))
    with torch.no_grad(), onefold.full_parameters(model, write=True):
        model[2].weight.fill_(float("inf"))
    for step in range(10):
        adam.backward(loss_of(model, step, False))
        adam.step()
        adam.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_a_scale_that_keeps_falling_ends_in_an_error_that_names_a_unit(stage: int) -> None:
    for error in run_ranks_raises(2, explode, stage):
        assert error.type_name == "PrecisionError" and "lowest loss scale (1)" in error.message
        assert "first in unit 2.bias…" in error.message, "backward meets the unit with the last layer first"


def forget_to_scale(stage: int) -> None:
    model, _ = build(stage, LossScale())
    loss_of(model, 0, False).backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_backward_in_fp16_says_what_to_call(stage: int) -> None:
    for error in run_ranks_raises(2, forget_to_scale, stage):
        assert error.type_name == "StateError" and "optimizer.backward(loss)" in error.message


def go_nan(precision: str, policy: str, stage: int) -> tuple[bool, bool, str]:
    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(8, 8), stage=stage, precision=precision)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, on_nonfinite=policy)
    error = ""
    for step in range(3):
        before = snapshot(model, adam)
        x = torch.ones(2, 8) * (float("nan") if step == 1 and dist.get_rank() == 1 else 1.0)
        model(x).float().sum().backward()
        adam.clip_grad_norm(1.0)
        try:
            adam.step()
        except onefold.PrecisionError as raised:
            error = str(raised)
        adam.zero_grad()
        if step == 1:
            kept = all(map(same_bits, before, snapshot(model, adam)))
    return kept, adam.stepped and adam.skipped == 1, error


@pytest.mark.parametrize(("precision", "policy"), thinned(["fp32", "bf16"], ["raise", "skip"]))
def test_nan_gradients_are_found_in_the_norm(precision: str, policy: str) -> None:
    for stage in STAGES:
        for kept, went_on, error in run_ranks(2, go_nan, precision, policy, stage):
            assert kept and went_on
            assert ("first in unit weight" in error) == (policy == "raise")


def one_bad_element(value: float, dtype: torch.dtype) -> tuple[str, list[int]]:
    """Trains with one gradient element of two of three layers set; the error, and calls for norms by step."""
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(3))),
                          stage=2, units=nn.Linear)  # fmt: skip
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    last = torch.zeros(64, 64, dtype=dtype)
    last[-1, -1] = value  # in the last rank's shard
    error, calls = "", []
    for step in range(3):
        loss = model(torch.ones(2, 64, dtype=dtype)).sum()
        if step == 1:
            loss = loss + ((model[0].weight + model[1].weight) * last).sum()
        loss.backward()
        adam.clip_grad_norm(1.0)
        try:
            adam.step()
        except onefold.PrecisionError as raised:
            error = str(raised)
        adam.zero_grad()
        flows = onefold.traffic(model).flows.items()
        calls.append(sum(flow.calls for (purpose, _), flow in flows if purpose == "norm"))
    return error, calls


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [(float("inf"), torch.float32, "first in unit 1;"), (1.2e154, torch.float64, "norm of all together overflows")],
)
def test_every_rank_names_the_unit_that_one_rank_found_and_asks_only_then(
    value: float, dtype: torch.dtype, told: str
) -> None:
    everyone = run_ranks(3, one_bad_element, value, dtype)
    for error, calls in everyone:
        assert told in error and error == everyone[0][0]
        assert calls == [1, 2, 1]
