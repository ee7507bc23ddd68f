"""Where states lie changes no bit: every tier, stage, number of ranks and precision, against the same run without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.offload.runs import PRECISIONS, TIERS, compare, offload_of, stages_of
from tests.parity.training import Run

CASES = [(tiers, stage) for tiers in TIERS for stage in stages_of(tiers)]


def assert_same_bits(ranks: int, run: Run, tiers: str, path: str) -> None:
    assert run_ranks(ranks, compare, run, offload_of(tiers, path)) == [[]] * ranks


@pytest.mark.parametrize(("case", "precision", "ranks"), thinned(CASES, PRECISIONS, (1, 2)))
def test_every_tier_gives_the_same_bits(case: tuple[str, int], precision: str, ranks: int, tmp_path) -> None:
    tiers, stage = case
    run = Run(stage=stage, steps=3, clip=0.1, fields=(("precision", PRECISIONS[precision]),))
    assert_same_bits(ranks, run, tiers, str(tmp_path))


@pytest.mark.parametrize(("case", "model"), thinned(CASES, ("skipping", "conv")))
def test_unused_parameters_and_other_layouts_give_the_same_bits(case: tuple[str, int], model: str, tmp_path) -> None:
    tiers, stage = case
    assert_same_bits(2, Run(model=model, stage=stage, steps=3), tiers, str(tmp_path))


@pytest.mark.parametrize(("case", "reduce"), thinned(CASES, ("once", "each")))
def test_accumulation_gives_the_same_bits(case: tuple[str, int], reduce: str, tmp_path) -> None:
    tiers, stage = case
    fields = (("precision", "bf16"),)
    run = Run(stage=stage, steps=3, micro=3, reduce=reduce, grouped=True, fields=fields)
    assert_same_bits(2, run, tiers, str(tmp_path))


@pytest.mark.parametrize(
    ("optimizer", "tiers"),
    thinned(
        ("sgd", "sgd-momentum", "adagrad", "rmsprop", "nadam", "adamw-fused"), ("optimizer on the host", "both on disk")
    ),
)
def test_every_optimizer_gives_the_same_bits(optimizer: str, tiers: str, tmp_path) -> None:
    run = Run(stage=3, steps=3, optimizer=optimizer, fields=(("precision", "bf16"),))
    assert_same_bits(2, run, tiers, str(tmp_path))


def two_steps_at_once(offload: Any) -> dict[str, Any]:
    """step() twice after one backward, and a backward whose gradients are not dropped before the next."""
    onefold.init()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    model = onefold.shard(layers, stage=3, precision="bf16", offload=offload, bucket_bytes=1 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(2, 32).bfloat16()).float().square().sum().backward()
        adam.step()
        adam.step()
    return onefold.full_state_dict(model)


def compare_loops(offload: Any) -> list[str]:
    plain, moved = two_steps_at_once(None), two_steps_at_once(offload)
    return [name for name in plain if not torch.equal(plain[name], moved[name])]


@pytest.mark.parametrize(("tiers", "ranks"), thinned(["optimizer on the host", "both on disk"], [1, 2]))
def test_unusual_loops_give_the_same_bits(tiers: str, ranks: int, tmp_path) -> None:
    assert run_ranks(ranks, compare_loops, offload_of(tiers, str(tmp_path))) == [[]] * ranks
