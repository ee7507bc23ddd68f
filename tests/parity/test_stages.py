"""All stages give the same bits; and those bits are what DistributedDataParallel computes."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import MODELS
from tests.parity.training import OPTIMIZERS, Run, Verdict, compare_stages, differing, train, train_ddp

RANKS = (1, 2, 3, 4)
FEW = (1, 2, 3)  # where a rank more shows nothing that it does not show in the tests with RANKS
SHARDED = (1, 2, 3)
NEAR_DDP = [
    Run(model="mlp"),
    Run(optimizer="sgd-momentum"),
    Run(optimizer="sgd-momentum", clip=0.05, grouped=True),
    Run(optimizer="sgd-momentum", micro=3, reduce="once"),
    Run(optimizer="sgd-momentum", micro=3, reduce="each"),
    Run(model="skipping"),
]


def assert_equal_across_stages(ranks: int, run: Run) -> list[Verdict]:
    verdicts = run_ranks(ranks, compare_stages, run, SHARDED)
    assert [verdict.differences for verdict in verdicts] == [[]] * ranks
    assert len({verdict.digest for verdict in verdicts}) == 1, "ranks ended with different parameters"
    return verdicts


@pytest.mark.parametrize(("model", "ranks"), thinned(MODELS, RANKS))
def test_stages_are_bitwise_equal_for_every_model(model: str, ranks: int) -> None:
    assert_equal_across_stages(ranks, Run(model=model))


@pytest.mark.parametrize(("optimizer", "ranks"), thinned(OPTIMIZERS, FEW))
def test_stages_are_bitwise_equal_for_every_optimizer(optimizer: str, ranks: int) -> None:
    assert_equal_across_stages(ranks, Run(optimizer=optimizer))


@pytest.mark.parametrize(("ranks", "grouped"), thinned(RANKS, [False, True]))
def test_stages_are_bitwise_equal_with_clipping_and_groups(ranks: int, grouped: bool) -> None:
    reference = assert_equal_across_stages(ranks, Run(clip=0.05, grouped=grouped))
    assert min(reference[0].norms) > 0.05, "the gradients were small, clipping did nothing"


@pytest.mark.parametrize(("model", "ranks", "reduce"), thinned(["gpt", "skipping", "conv"], FEW, ["once", "each"]))
def test_stages_are_bitwise_equal_under_accumulation(model: str, ranks: int, reduce: str) -> None:
    assert_equal_across_stages(ranks, Run(model=model, micro=3, reduce=reduce, clip=0.5))


@pytest.mark.parametrize(("ranks", "threads"), [pytest.param(2, 2, marks=pytest.mark.soak), (3, 3)])
def test_stages_are_bitwise_equal_with_several_threads(ranks: int, threads: int) -> None:
    """Large enough that kernels split their work over threads."""
    run = Run(model="wide", optimizer="adamw-fused", threads=threads, bucket_bytes=32 << 20)
    assert_equal_across_stages(ranks, run)
    assert_equal_across_stages(ranks, Run(model="wide", threads=threads, bucket_bytes=32 << 20, clip=0.1))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 10, 64 << 20])
def test_stages_are_bitwise_equal_for_every_unit_size(bucket_bytes: int) -> None:
    assert_equal_across_stages(2, Run(bucket_bytes=bucket_bytes))


@pytest.mark.parametrize(
    ("model", "stage"),
    thinned([name for name in MODELS if name != "gpt-reentrant"], [0, *SHARDED]),  # which DDP itself refuses
)
def test_two_ranks_equal_ddp_bit_for_bit(model: str, stage: int) -> None:
    """Unclipped, no accumulation, the same optimizer implementation: the sum of two is the same in any order."""
    theirs = run_ranks(2, train_ddp, Run(model=model))
    ours = run_ranks(2, train, Run(model=model, stage=stage))
    assert differing(ours[0], theirs[0]) == []
    assert ours[1].losses == theirs[1].losses


@pytest.mark.parametrize(("run", "place"), thinned(NEAR_DDP, [(0, 3), (2, 4)]))
def test_equal_to_ddp_within_float_tolerance(run: Run, place: tuple[int, int]) -> None:
    """SGD where a gradient is zero but for rounding (attention's key bias): Adam would blow the rounding up."""
    stage, ranks = place
    ours, theirs = run_ranks(ranks, train, run.at(stage))[0], run_ranks(ranks, train_ddp, run)[0]
    for name, value in ours.params.items():
        torch.testing.assert_close(value, theirs.params[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(ours.norms, theirs.norms, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
