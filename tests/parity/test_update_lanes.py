"""Tensors that are updated beside each other on two streams: no two uses of the same bytes run without an order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.optim import finite
from tests.harness import run_ranks
from tests.harness.stream_races import watched
from tests.parity.whole import LAMB

SPLIT = onefold.Precision(compute="bf16", master="split")
UNITS = 2 << 10  # bytes of a bucket: each layer is a unit, and two or three tensors are under way
RUNS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "bucket_bytes": UNITS},
    {"stage": 3, "bucket_bytes": UNITS, "precision": SPLIT, "clip": True},
    {"stage": 1, "precision": SPLIT, "micro": 2, "clip": True},
    {"stage": 0, "precision": SPLIT},
    {"stage": 3, "inside": True, "bucket_bytes": 8 << 10},
    {"stage": 2, "inside": True, "precision": SPLIT},
    {"stage": 3, "precision": "bf16", "bucket_bytes": UNITS, "clip": True, "skip": True},
    {"stage": 2, "precision": SPLIT, "clip": True, "skip": True, "split": {"*weight": (12, 4)}},  # unequal rates
    {"stage": 1, "precision": "fp16", "micro": 2},
    {"stage": 2, "offload": "host"},  # one by one: memory is short
    {"stage": 3, "offload": "host", "precision": SPLIT, "clip": True, "skip": True},
    {"stage": 3, "offload": onefold.Offload(optimizer="host", parameters="host"), "inside": True},
]


@contextmanager
def flags_on_the_device() -> Iterator[None]:
    """Inside, updates read a flag that says whether to skip the step, as on CUDA."""
    before = set(finite.FLAG_STAYS_ON)
    finite.FLAG_STAYS_ON.add("cpu")
    try:
        yield
    finally:
        finite.FLAG_STAYS_ON.intersection_update(before)


def races(
    clip: bool = False, micro: int = 1, inside: bool = False, skip: bool = False, split: Any = None, **fields: Any
) -> tuple[int, list[str]]:
    """On a rank: how many streams updates ran on, and the races of three steps."""
    with watched() as recorder, flags_on_the_device():
        torch.manual_seed(0)
        model = onefold.shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)]), **fields)
        optimizer = onefold.Muon(
            model, place={"*weight": "muon"}, split=split, step_in_backward=inside,
            on_nonfinite="skip" if skip else "raise",
        )  # fmt: skip
        for _ in range(3):
            for _ in range(micro - 1):
                with onefold.accumulate(model):
                    optimizer.backward(model(torch.ones(4, 16)).square().mean())
            optimizer.backward(model(torch.ones(4, 16)).square().mean())
            if clip:
                optimizer.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
    updated = {stream for what, stream in recorder.kernels if what == "aten.lerp_.Scalar" and stream != "compute"}
    return len(updated), recorder.races


def all_races() -> list[tuple[int, list[str]]]:
    return [races(**run) for run in RUNS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_two_streams_use_the_same_bytes_without_an_order(ranks: int) -> None:
    for found in run_ranks(ranks, all_races):
        for run, (streams, told) in zip(RUNS, found, strict=True):
            assert told == [], f"{run}: {len(told)} races"
            assert streams == (0 if "offload" in run else 2), f"{run}: updated on {streams} streams"


class FailsOnce(LAMB):
    """Raises in its third update."""

    updates = 0

    def direction(self, *args: Any) -> Any:
        FailsOnce.updates += 1
        if FailsOnce.updates == 3:
            raise ZeroDivisionError("this class fails")
        return super().direction(*args)


def races_after_an_error() -> list[str]:
    with watched() as recorder:
        model = onefold.shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)]), stage=2, precision=SPLIT)
        optimizer = onefold.Optimizer(model, FailsOnce)
        model(torch.ones(4, 16)).square().mean().backward()
        FailsOnce.updates = 0
        with suppress(ZeroDivisionError):
            optimizer.step()
        assert FailsOnce.updates == 3
        torch.ones(1 << 20).add_(1)  # may lie where buffers of the failed update lay
    return recorder.races


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_failed_update_its_memory_is_used_in_order(ranks: int) -> None:
    assert run_ranks(ranks, races_after_an_error) == [[]] * ranks
