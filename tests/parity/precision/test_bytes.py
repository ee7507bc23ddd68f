"""What mixed precision holds, by measured storages: 16 bytes per parameter over N, 14 with the split master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import Precision
from tests.harness import run_ranks
from tests.harness.grids import thinned

WIDTH, DEPTH = 64, 8  # without biases: no padding at N = 1, 2, 4
PSI = DEPTH * WIDTH * WIDTH
PLAIN, SPLIT = Precision(compute="bf16", master="fp32"), Precision(compute="bf16", master="split")
WIDE = {"grad": "fp32", "compute": "bf16"}
BYTES: list[tuple[Precision, dict[int, Any]]] = [  # stage -> bytes per parameter: of the whole, and of what is sharded
    (PLAIN, {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}),
    (SPLIT, {0: (14, 0), 1: (4, 10), 2: (2, 12), 3: (0, 14)}),
    (Precision(**WIDE, master="fp32"), {1: (6, 12), 2: (2, 16), 3: (0, 18)}),
    (Precision(**WIDE, master="split"), {1: (6, 10), 2: (2, 14), 3: (0, 16)}),
]


def hold(stage: int, precision: Precision, accumulate: bool = False) -> onefold.MemoryReport:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    model = onefold.shard(model, stage=stage, precision=precision, bucket_bytes=1)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        adam.zero_grad()
        if accumulate:
            with onefold.accumulate(model, reduce="each"):
                model(x).float().sum().backward()
        model(x).float().sum().backward()
        adam.step()
    return onefold.memory(model)


CASES = [(precision, stage, *both) for precision, stages in BYTES for stage, both in stages.items()]


@pytest.mark.parametrize(("case", "ranks"), thinned(CASES, [2, 4]))
def test_states_take_the_bytes_of_the_table(case: tuple[Precision, int, int, int], ranks: int) -> None:
    precision, stage, whole, sharded = case
    for report in run_ranks(ranks, hold, stage, precision):
        small = 4 * DEPTH + (2 * DEPTH if stage == 3 else 0)  # a step count, and at stage 3 a mark, per unit
        assert report.states == PSI * whole + PSI * sharded // ranks + small
        for part in (report.parameters, report.gradients, report.optimizer):
            assert part.measured == part.planned
        assert report.communication.measured <= report.communication.planned


@pytest.mark.parametrize(("precision", "sharded"), [(PLAIN, 18), (SPLIT, 16)])
def test_gradients_are_fp32_once_they_accumulate(precision: Precision, sharded: int) -> None:
    for report in run_ranks(2, hold, 3, precision, accumulate=True):
        assert report.states == PSI * sharded // 2 + 6 * DEPTH
