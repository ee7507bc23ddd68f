"""Over NCCL all stages give the same bits: precisions, optimizers, clipping, accumulation, offload, recomputation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import onefold
from tests.nccl.ranks import MARKS, RANKS, run_nccl
from tests.offload.runs import with_fields
from tests.parity.training import Run, Verdict, compare_stages, digest_of, train

pytestmark = MARKS
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "sgd-momentum", "adagrad")  # the last of which has no fused kernel
STAGES = (1, 2, 3)
SMALL = Run(steps=2, bucket_bytes=16 << 10)


def compare_all(runs: list[Run], stages: tuple[int, ...]) -> list[Verdict]:
    return [compare_stages(run, stages) for run in runs]


def assert_equal_across_stages(ranks: int, runs: list[Run], stages: tuple[int, ...] = STAGES) -> None:
    per_rank = run_nccl(ranks, compare_all, runs, stages, timeout_s=120)
    for run, *verdicts in zip(runs, *per_rank, strict=True):
        assert [verdict.differences for verdict in verdicts] == [[]] * ranks, run
        assert len({verdict.digest for verdict in verdicts}) == 1, f"ranks ended with different parameters: {run}"
        if run.clip is not None:
            finite = [norm for norm in verdicts[0].norms if math.isfinite(norm)]  # fp16 skips its first steps
            assert min(finite) > run.clip, f"the gradients were small, clipping did nothing: {run}"


def with_precision(precision: str, **fields: Any) -> Run:
    return with_fields(dataclasses.replace(SMALL, **fields), precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_stages_are_bitwise_equal_for_every_precision_and_optimizer(precision: str, clip: float | None) -> None:
    assert_equal_across_stages(2, [with_precision(precision, optimizer=name, clip=clip) for name in OPTIMIZERS])


def test_stages_are_bitwise_equal_on_four_ranks() -> None:
    pairs = zip(PRECISIONS, OPTIMIZERS, (None, 0.01, None), strict=True)
    assert_equal_across_stages(4, [with_precision(one, optimizer=two, clip=clip) for one, two, clip in pairs])


@pytest.mark.parametrize("ranks", RANKS)
def test_stages_are_bitwise_equal_for_models_with_traits_that_break_sharding(ranks: int) -> None:
    names = ("gpt-tied", "gpt-reentrant", "skipping", "twice", "odd", "conv")
    assert_equal_across_stages(ranks, [Run(model=name, bucket_bytes=4 << 10) for name in names], (2, 3))


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_stages_are_bitwise_equal_under_accumulation(reduce: str) -> None:
    models = ("gpt", "skipping")
    runs = [with_precision("bf16", model=name, micro=3, reduce=reduce, clip=1e-3) for name in models]
    assert_equal_across_stages(2, [*runs, dataclasses.replace(SMALL, micro=2, reduce=reduce)])


@pytest.mark.parametrize("policy", ["checkpoint", "checkpoint+host"])
def test_blocks_computed_again_in_backward_change_no_bit(policy: str) -> None:
    runs = [with_fields(with_precision(precision), activations=policy) for precision in ("fp32", "bf16")]
    assert_equal_across_stages(2, runs, (2, 3))


def trained(runs: dict[str, Run]) -> dict[str, tuple[str, list[float]]]:
    """On a rank: the digest of the parameters at the end, and all losses."""
    return {name: (digest_of(one), one.losses) for name, one in ((name, train(run)) for name, run in runs.items())}


@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 2), ("bf16", 2), ("bf16", 4)])
def test_updates_in_backward_give_the_bits_of_a_step(precision: str, ranks: int) -> None:
    plain = with_precision(precision, optimizer="adamw-fused")
    inside = dataclasses.replace(plain, step_in_backward=True)
    runs = {"plain": plain, **{f"stage {stage}": inside.at(stage) for stage in (0, 2, 3)}}
    found = run_nccl(ranks, trained, runs, timeout_s=120)
    assert len({digest for rank in found for digest, _ in rank.values()}) == 1, found


@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 2), ("bf16", 2), ("bf16", 4)])
def test_updated_parameters_that_arrive_in_forward_have_the_same_bits(precision: str, ranks: int) -> None:
    plain = with_precision(precision, optimizer="adamw-fused", clip=0.01)
    late = with_fields(plain, overlap_param_gather=True)
    runs = {"plain": plain.at(0), "stage 1": late.at(1), "stage 2": late.at(2)}
    found = run_nccl(ranks, trained, runs, timeout_s=120)
    assert len({digest for rank in found for digest, _ in rank.values()}) == 1, found


HOST = onefold.Offload(optimizer="host")
BOTH = onefold.Offload(optimizer="host", parameters="host")


@pytest.mark.parametrize(("precision", "clip", "ranks"), [("fp32", 0.01, 2), ("bf16", None, 2), ("bf16", 0.01, 4)])
def test_updates_on_the_host_give_the_same_bits_at_every_stage(precision: str, clip: float | None, ranks: int) -> None:
    """Among themselves: kernels of the host and of the device round differently, so losses without offload are near."""
    plain = with_precision(precision, clip=clip)
    host = with_fields(plain, offload=HOST)
    runs = {
        "not offloaded": plain.at(2),
        "stage 2": host.at(2),
        "stage 3": host.at(3),
        "stage 3, parameters too": with_fields(plain.at(3), offload=BOTH),
    }
    if clip is None:
        runs["stage 2, in backward"] = dataclasses.replace(host.at(2), step_in_backward=True)
        runs["stage 3, in backward"] = dataclasses.replace(host.at(3), step_in_backward=True)
    found = run_nccl(ranks, trained, runs, timeout_s=120)
    near = [rank.pop("not offloaded")[1] for rank in found]
    assert len({digest for rank in found for digest, _ in rank.values()}) == 1, found
    for losses, rank in zip(near, found, strict=True):
        assert rank["stage 3"][1] == pytest.approx(losses, rel=2e-3)
