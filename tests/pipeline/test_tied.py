"""The GPT in a pipeline: its embedding is tied to the head, so the first and the last stage both hold it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.cut import Part, loss_of
from onefold.train.run.model import GPT, Block, initialise
from tests.harness import run_ranks, run_ranks_raises
from tests.pipeline.steps import place_in, stepped

SHAPE = Shape(layers=3, hidden=32, heads=2, seq=16, vocab=48)
STEPS, BATCH, MICRO, CLIP = 3, 8, 4, 0.5


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    sent: dict[str, int]


def fill(module: nn.Module) -> None:
    initialise(module, SHAPE.layers)


def unit(name: str, module: nn.Module) -> bool:
    return name == "wte" or isinstance(module, Block)


def batch(step: int) -> Tensor:
    return torch.randint(SHAPE.vocab, (BATCH, SHAPE.seq + 1), generator=torch.Generator().manual_seed(step))


def momentum(model: nn.Module) -> onefold.Optimizer:
    return onefold.Optimizer(model, torch.optim.SGD, lr=0.5, momentum=0.9)


def alone() -> Trained:
    onefold.init()
    with torch.device("meta"):
        model = GPT(SHAPE)
    onefold.shard(model, stage=0, init=fill, units=unit)
    optimizer, losses, norms = momentum(model), [], []
    for step in range(STEPS):
        tokens = batch(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norms.append(optimizer.clip_grad_norm(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, norms, onefold.full_state_dict(model), {})


def piped(stages: int, zero: int, precision: str = "fp32") -> Trained:
    shards = dist.get_world_size() // stages
    mesh = onefold.mesh(pp=stages, shard=shards)
    at, shard, _ = place_in(mesh)
    with torch.device("meta"):
        part = Part(SHAPE, at, stages)
    onefold.shard(part, stage=zero, mesh=mesh, init=fill, units=unit, precision=precision)
    stage = onefold.PipelineStage(part, mesh, reduce="each", tied=["wte.weight"])
    optimizer, means, norms = momentum(part), [], []
    run = Schedule1F1B(stage, MICRO // shards, loss_fn=loss_of, scale_grads=False)
    for step in range(STEPS):
        tokens = batch(step).tensor_split(shards)[shard]
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        norm, mean = stepped(run, stage, optimizer, mesh, x, y, CLIP)
        norms.append(norm)
        means += mean
    return Trained(means, norms, onefold.full_state_dict(part), onefold.traffic(part).by_purpose)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 4), (3, 3)])
def test_a_tied_embedding_trains_as_in_one_process_and_stays_one(stages, ranks):
    [wanted] = run_ranks(1, alone)
    first = run_ranks(ranks, piped, stages, 0)
    torch.testing.assert_close(torch.tensor(first[0].norms), torch.tensor(wanted.norms), rtol=1e-5, atol=1e-6)
    for name, value in wanted.params.items():
        found = [rank.params[name] for rank in first if name in rank.params]
        assert all(torch.equal(found[0], other) for other in found), f"{name}: the ends differ"
        torch.testing.assert_close(found[0], value, rtol=1e-4, atol=1e-5)
    for zero in (1, 2, 3):
        for before, after in zip(first, run_ranks(ranks, piped, stages, zero), strict=True):
            assert (after.losses, after.norms) == (before.losses, before.norms)
            assert all(torch.equal(after.params[name], value) for name, value in before.params.items())


def test_only_shards_of_the_tied_embedding_travel_between_the_ends():
    shard = 4 * SHAPE.vocab * SHAPE.hidden // 2
    assert [rank.sent["sum-tied"] for rank in run_ranks(4, piped, 2, 3)] == [shard] * 4


def test_sixteen_bits_keep_both_ends_equal():
    ranks = run_ranks(2, piped, 2, 2, "bf16")
    assert torch.equal(ranks[0].params["wte.weight"], ranks[1].params["wte.weight"])


def differing_values() -> None:
    mesh = onefold.mesh(pp=2)
    torch.manual_seed(dist.get_rank())
    part = onefold.shard(Part(SHAPE, dist.get_rank(), 2), mesh=mesh, units=unit)
    onefold.PipelineStage(part, mesh, tied=["wte.weight"])


def shared_unit() -> None:
    mesh = onefold.mesh(pp=2)
    torch.manual_seed(0)
    part = onefold.shard(Part(SHAPE, dist.get_rank(), 2), mesh=mesh)
    onefold.PipelineStage(part, mesh, tied=["wte.weight"])


def unknown_name() -> None:
    mesh = onefold.mesh(pp=2)
    part = onefold.shard(Part(SHAPE, dist.get_rank(), 2), mesh=mesh, units=unit)
    onefold.PipelineStage(part, mesh, tied=["head.weight"])


@pytest.mark.parametrize(
    ("mistake", "said"),
    [(differing_values, "values of wte.weight"), (shared_unit, "unit of its own"), (unknown_name, "head.weight")],
)
def test_ties_that_cannot_be_are_refused_at_both_ends(mistake, said):
    for caught in run_ranks_raises(2, mistake):
        assert said in caught.message
