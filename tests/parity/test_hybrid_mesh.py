"""Sharded inside one axis, replicated over the other: the same training, less across the slow axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import MODELS
from tests.parity.training import OPTIMIZERS, Run, Trained, differing, loop, same_bits, train


def train_on_mesh(run: Run, replicas: int) -> tuple[Trained, dict[str, int], dict[str, int], int]:
    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(1234)
    case = MODELS[run.model]
    model = onefold.shard(case.build(), stage=run.stage, bucket_bytes=run.bucket_bytes, mesh=mesh)
    cls, kwargs = OPTIMIZERS[run.optimizer]
    optimizer = onefold.Optimizer(model, cls, **kwargs)

    def clip() -> list[torch.Tensor]:
        return [optimizer.clip_grad_norm(run.clip)] if run.clip is not None else []

    trained = loop(run, model, case.loss, optimizer, clip, lambda: onefold.accumulate(model, reduce=run.reduce))
    report = onefold.traffic(model)
    shard_bytes = sum(unit.layout.shard_numel * unit.layout.itemsize for unit in engine_of(model).units)
    return trained, report.by_purpose, report.planned, shard_bytes


RUNS = [
    Run(optimizer="sgd-momentum", clip=0.05),
    Run(model="skipping", optimizer="sgd-momentum"),
    Run(optimizer="sgd-momentum", micro=3, reduce="each"),
    Run(optimizer="sgd-momentum", micro=2, reduce="once"),
]


@pytest.mark.parametrize(("run", "grid"), thinned(RUNS, [(4, 2), (3, 3), (2, 2)]))
def test_all_stages_are_bitwise_equal_on_a_mesh_and_near_the_flat_run(run: Run, grid: tuple[int, int]) -> None:
    ranks, replicas = grid
    flat = run_ranks(ranks, train, run)[0]
    reference = run_ranks(ranks, train_on_mesh, run, replicas)
    for name, value in flat.params.items():
        torch.testing.assert_close(reference[0][0].params[name], value, rtol=2e-4, atol=2e-5)
    for stage in (1, 2, 3):
        for rank, (trained, *_) in enumerate(run_ranks(ranks, train_on_mesh, run.at(stage), replicas)):
            assert differing(trained, reference[0][0]) == [], f"stage {stage}, rank {rank}"
            assert all(same_bits(a, b) for a, b in zip(trained.norms, reference[0][0].norms, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_only_the_sum_of_one_shard_crosses_the_replicas(stage: int) -> None:
    for _, sent, planned, shard_bytes in run_ranks(4, train_on_mesh, Run(stage=stage, clip=1.0), 2):
        assert sent == planned
        assert sent["reduce-replica"] == shard_bytes, "an all-reduce over two: half of the shard sent, twice"
