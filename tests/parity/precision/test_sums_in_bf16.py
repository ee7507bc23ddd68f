"""Precision(accumulate="bf16"): micro-batches add up in bf16, half the bytes, with the same bits at every stage."""

from __future__ import annotations

from typing import Any

import torch

import onefold
from tests.harness import run_ranks
from tests.models import MODELS
from tests.parity.training import Run, differing, train

IN_BF16 = onefold.Precision(compute="bf16", accumulate="bf16")
MICRO = 4


def compare() -> list[str]:
    """On every rank: where stages, tiers and fp32 sums differ from stage 0 in bf16."""
    found: list[str] = []
    for reduce in ("once", "each"):
        run = Run(steps=2, micro=MICRO, reduce=reduce, fields=(("precision", IN_BF16),))
        base = train(run)
        for stage in (1, 2, 3):
            found += [f"{reduce}, stage {stage}: {name}" for name in differing(train(run.at(stage)), base)]
        host = Run(stage=3, steps=2, micro=MICRO, reduce=reduce, fields=(*run.fields, ("offload", "host")))
        found += [f"{reduce}, host: {name}" for name in differing(train(host), base)]
        wide = train(Run(steps=2, micro=MICRO, reduce=reduce, fields=(("precision", "bf16"),)))
        if not differing(wide, base):
            found.append(f"{reduce}: sums in fp32 have the same bits, so sums are not in bf16")
        far = [abs(a - b) for a, b in zip(wide.losses, base.losses, strict=True)]
        if max(far) > 0.02:
            found.append(f"{reduce}: losses are {max(far):.3f} from those of sums in fp32")
    return found


def test_all_stages_and_the_host_give_the_same_bits_near_those_of_sums_in_fp32() -> None:
    assert run_ranks(2, compare) == [[], []]


def kept_bytes(precision: Any, stage: int) -> tuple[int, int]:
    """Bytes of gradients between two micro-batches of the second step: measured, and as planned."""
    onefold.init()
    torch.manual_seed(0)
    case = MODELS["gpt"]
    model = onefold.shard(case.build(), stage=stage, precision=precision, bucket_bytes=64 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    report = None
    for _ in range(2):
        with onefold.accumulate(model):
            case.loss(model, torch.Generator().manual_seed(1), 0).backward()
        report = onefold.memory(model)
        case.loss(model, torch.Generator().manual_seed(2), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert report is not None
    return report.gradients.measured, report.gradients.planned or 0


def test_gradients_between_micro_batches_take_half_the_bytes() -> None:
    for stage in (0, 2):
        [(wide, planned_wide)] = run_ranks(1, kept_bytes, "bf16", stage)
        [(narrow, planned)] = run_ranks(1, kept_bytes, IN_BF16, stage)
        assert (narrow, planned) == (wide // 2, planned_wide // 2)
        assert narrow == planned
