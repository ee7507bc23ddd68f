"""Over NCCL, ranks that skip and repeat blocks never wait for each other in a circle: what they enqueue can all run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness.pool import run_ranks
from tests.harness.recorded_streams import Recording, circle, recorded
from tests.models import EndsFirst
from tests.nccl.programs import BLOCKS, Picks, Program, chain, random_program

FIELDS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3, prefetch 0": {"stage": 3, "prefetch": 0},
    "stage 3, prefetch 1": {"stage": 3, "prefetch": 1},
    "stage 3, prefetch 2": {"stage": 3, "prefetch": 2},
}


def train(model: nn.Module, fields: dict[str, Any], losses_of_steps: Callable[[], Iterator[list[Tensor]]]) -> Recording:
    with recorded() as recorder:
        model = onefold.shard(model, **fields)
        optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
        for losses in losses_of_steps():
            if losses:
                sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        return recorder.recording


def skipping_with_ends_first(bucket_bytes: int) -> dict[str, Recording]:
    def steps() -> Iterator[list[Tensor]]:
        for step in range(12):
            yield [model(torch.ones(4, 16), (7 * step + 3 * dist.get_rank()) % 6).square().mean()]

    recordings = {}
    for name, fields in FIELDS.items():
        model = EndsFirst(64, BLOCKS)
        recordings[name] = train(model, fields | {"bucket_bytes": bucket_bytes}, steps)
    return recordings


def assert_no_circle(found: list[dict[str, Recording]]) -> None:
    for name in found[0]:
        recordings = [rank[name] for rank in found]
        assert all(any(op.kind == "message" for ops in one.program.values() for op in ops) for one in recordings)
        assert circle(recordings) == "", name
        assert [one.host_waits for one in recordings] == [0] * len(recordings), name


@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 12])
def test_ranks_skip_blocks_of_a_net_whose_ends_share_a_unit(bucket_bytes: int) -> None:
    """Units of one parameter each, and small parameters together."""
    assert_no_circle(run_ranks(2, skipping_with_ends_first, bucket_bytes))


def run_programs(programs: list[Program], replicas: int) -> list[dict[str, Recording]]:
    fields = {"mesh": onefold.mesh(replica=replicas, shard=dist.get_world_size() // replicas)} if replicas > 1 else {}
    return [{name: run_program(program, one | fields) for name, one in FIELDS.items()} for program in programs]


def run_program(program: Program, fields: dict[str, Any]) -> Recording:
    picks = Picks()
    model = chain(picks, 16)

    def steps() -> Iterator[list[Tensor]]:
        for step, evaluated in zip(program.steps, program.evaluated, strict=True):
            losses = []
            for picks.ranks in step:
                losses.append(model(torch.ones(2, 16)).square().mean())
                if not program.together:
                    losses.pop().backward()
            yield losses
            if evaluated:
                with torch.no_grad():
                    model(torch.ones(2, 16))

    return train(model, {"bucket_bytes": 1 << 9} | fields, steps)


@pytest.mark.parametrize(
    ("ranks", "count", "replicas", "together"),
    [
        (2, 2, 1, False),
        (4, 1, 2, True),
        pytest.param(2, 4, 1, False, marks=pytest.mark.soak),
        pytest.param(2, 4, 1, True, marks=pytest.mark.soak),
        pytest.param(4, 1, 2, False, marks=pytest.mark.soak),
    ],
)
def test_random_programs(ranks: int, count: int, replicas: int, together: bool) -> None:
    programs = [random_program(ranks, seed, together) for seed in range(count)]
    for found in zip(*run_ranks(ranks, run_programs, programs, replicas), strict=True):
        assert_no_circle(list(found))
