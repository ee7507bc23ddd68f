"""The CPU's update kernel in training: the same bits with it and without it, and on all ranks or on none."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.observe.rehearsal import rehearse
from onefold.optim import unit_optimizer as slices
from onefold.optim.elementwise import cost_of
from onefold.optim.kernels.cpu import _kernel, available, update
from onefold.settings.zero import Zero
from tests.harness import run_ranks
from tests.parity.precision.test_stages_16bit import POLICIES, run_in
from tests.parity.training import Trained, differing, digest_of, train
from tests.planner.test_exact import measure

pytestmark = pytest.mark.skipif(not available(), reason="needs a C compiler")

ALIKE = platform.machine() in ("aarch64", "arm64")  # torch's kernels for x86 fuse other products and sums


@contextmanager
def no_compiler() -> Iterator[None]:
    """As on a machine that has none."""
    before = dict(os.environ)
    os.environ.update(PATH="", CC="")
    _kernel.cache_clear()
    try:
        yield
    finally:
        os.environ.update(before)
        _kernel.cache_clear()


def counted(run: Any) -> tuple[Trained, int]:
    """Train, and count how often the kernel was called."""
    calls = []

    def counting(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        update(*args, **kwargs)

    slices.update_on_cpu = counting
    try:
        return train(run), len(calls)
    finally:
        slices.update_on_cpu = update


def compare(policy: str, optimizer: str, stages: tuple[int, ...]) -> list[str]:
    found = []
    for stage in stages:
        run = run_in(policy, stage=stage, optimizer=optimizer, clip=0.5, grouped=True, steps=3)
        ours, calls = counted(run)
        with no_compiler():
            theirs, none = counted(run)
        assert calls > 0 == none, (calls, none)
        found += [f"stage {stage}: {name}" for name in differing(ours, theirs)]
        found += [f"stage {stage}: loss {a}, {b}" for a, b in zip(ours.losses, theirs.losses) if a != b]
    return found


@pytest.mark.skipif(not ALIKE, reason="torch rounds differently on this processor")
@pytest.mark.parametrize(
    ("policy", "optimizer", "stages"),
    [("bf16", "adamw", (0, 1, 2, 3)), ("split", "adamw-fused", (0, 3)), ("fp16", "sgd-momentum", (1, 2))],
)
def test_training_ends_with_the_same_bits_with_and_without_the_kernel(policy: str, optimizer: str, stages: Any) -> None:
    assert run_ranks(2, compare, policy, optimizer, stages) == [[], []]


def lonely(without: int | None) -> tuple[str, int, list[str]]:
    """Train at stage 0, where every rank updates everything; one rank has no compiler."""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("onefold")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with no_compiler() if dist.get_rank() == without else nullcontext():
            trained, calls = counted(run_in("bf16"))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return digest_of(trained), calls, said


def test_if_one_rank_has_no_kernel_no_rank_uses_it() -> None:
    (first, calls, _), _ = run_ranks(2, lonely, None)
    everyone = run_ranks(2, lonely, 1)
    assert calls > 0 and [calls for _, calls, _ in everyone] == [0, 0]
    assert len({digest for digest, _, _ in everyone} | ({first} if ALIKE else set())) == 1
    for _, _, said in everyone:
        assert sum("rank 1 has no update kernel" in line for line in said) == 1


def planned_and_measured(policy: str, without: bool) -> list[tuple[int, int]]:
    """Constant buffers and the peak, of a steady step."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    zero, x = Zero(stage=2, bucket_bytes=1 << 18, precision=POLICIES[policy]), torch.ones(2, 256)
    with no_compiler() if without else nullcontext():
        _, buffers, peak, _ = measure(build(), x, zero, "adamw")
        planned = rehearse(build(), x, zero, cost_of("adamw"), ranks=2, rank=dist.get_rank())
    return [(planned.communication, buffers), (planned.peak_bytes, peak)]


def test_it_borrows_no_memory_and_plans_know_it() -> None:
    found = [run_ranks(2, planned_and_measured, "split", without)[0] for without in (False, True)]
    for planned, measured in [pair for row in found for pair in row]:
        assert planned == pytest.approx(measured, rel=0.02)
    (_, ours), (_, theirs) = (row[1] for row in found)
    assert ours < theirs
