"""Meshes over NCCL: replicas of shards, tensor and pipeline parallelism, block inputs divided among ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import onefold
from tests.activations import runs as activations
from tests.harness import device
from tests.nccl.ranks import MARKS, run_nccl
from tests.offload.runs import with_fields
from tests.parity.training import Run, Verdict, compare_stages, digest_of, train
from tests.pipeline.runs import piped, together
from tests.tensor import runs as tensor

pytestmark = MARKS
SMALL = Run(steps=2, bucket_bytes=16 << 10)
BF16 = with_fields(SMALL, precision="bf16")
HYBRID = {
    "fp32": SMALL,
    "fp32, clipped": dataclasses.replace(SMALL, clip=0.01),
    "bf16": BF16,
    "bf16, accumulated": dataclasses.replace(BF16, micro=2, reduce="each"),
    "bf16, small units replicated": with_fields(BF16, keep_whole=600),
    "skipping": dataclasses.replace(BF16, model="skipping", steps=4),
}


def on_hybrid_meshes(runs: dict[str, Run]) -> tuple[dict[str, Verdict], str, str]:
    """On a rank: every run at all stages, of two replicas; and the bf16 run's digest, on a mesh and without."""
    mesh = onefold.mesh(replica=2, shard=2, device=device())
    verdicts = {name: compare_stages(run, (1, 2, 3), mesh) for name, run in runs.items()}
    flat = digest_of(train(runs["bf16"].at(3)))
    return verdicts, verdicts["bf16"].digest, flat


def test_stages_are_bitwise_equal_on_a_hybrid_mesh_and_in_16_bits_equal_to_the_flat_run() -> None:
    """16-bit gradients summed in fp32 lose nothing, so also two sums of two give the bits of a sum of four."""
    found = run_nccl(4, on_hybrid_meshes, HYBRID, timeout_s=180)
    for name in HYBRID:
        verdicts = [rank[0][name] for rank in found]
        assert [verdict.differences for verdict in verdicts] == [[]] * 4, name
        assert len({verdict.digest for verdict in verdicts}) == 1, name
    assert len({digest for _, *digests in found for digest in digests}) == 1, "bf16: the mesh and the flat run differ"


def units_kept_whole() -> list[Verdict]:
    return [compare_stages(with_fields(SMALL, keep_whole=numel), (2, 3)) for numel in (0, 600, 1 << 20)]


def test_replicated_units_change_no_bit() -> None:
    found = run_nccl(2, units_kept_whole)
    assert [verdict.differences for rank in found for verdict in rank] == [[]] * 6
    assert len({verdict.digest for rank in found for verdict in rank}) == 1


TENSOR = {
    2: [tensor.Run(shard=1, tp=2), tensor.Run(shard=1, tp=2, sequence=True)],
    4: [tensor.Run(shard=2, tp=2), tensor.Run(shard=2, tp=2, fields=(("precision", "bf16"),))],
}


@pytest.mark.parametrize("ranks", TENSOR)
def test_stages_are_bitwise_equal_beside_tensor_parallelism(ranks: int) -> None:
    bases = TENSOR[ranks]
    runs = [base.at(stage) for base in bases for stage in range(4)]
    found = run_nccl(ranks, tensor.train, runs, timeout_s=120)
    for rank in found:
        for number in range(len(bases)):
            first, *others = rank[4 * number : 4 * number + 4]
            for stage, other in enumerate(others, 1):
                assert other.losses == first.losses and other.norms == first.norms, (bases[number], stage)
                assert all(torch.equal(other.params[name], value) for name, value in first.params.items())


def all_pipelines(names: list[str]) -> list[list[object]]:
    return [[piped(2, zero, name) for zero in range(4)] for name in names]


@pytest.mark.parametrize(("ranks", "schedules"), [(2, ["gpipe", "1f1b"]), (4, ["1f1b"])])
def test_stages_are_bitwise_equal_beside_a_pipeline(ranks: int, schedules: list[str]) -> None:
    found = run_nccl(ranks, all_pipelines, schedules, timeout_s=120)
    for number in range(len(schedules)):
        runs = [together([rank[number][zero] for rank in found]) for zero in range(4)]
        assert runs[0].losses[-1] < runs[0].losses[0]
        for run in runs[1:]:
            assert (run.losses, run.norms) == (runs[0].losses, runs[0].norms)
            assert all(torch.equal(run.params[name], value) for name, value in runs[0].params.items())


def divided_inputs() -> dict[str, str]:
    """On a rank: one batch for all ranks; kept, computed again, and computed again from divided inputs."""
    mesh = activations.mesh_of("partition")
    cases = [("keep", 2), ("checkpoint", 3), ("partition", 2), ("partition", 3), ("partition+host", 3)]
    runs = [(policy, stage, activations.train(policy, stage, same_batch=True, mesh=mesh)) for policy, stage in cases]
    return {f"{policy} at stage {stage}": run.digest for policy, stage, run in runs}


def test_divided_block_inputs_change_no_bit() -> None:
    found = run_nccl(2, divided_inputs, timeout_s=120)
    assert len({digest for rank in found for digest in rank.values()}) == 1, found
