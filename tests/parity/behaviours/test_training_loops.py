"""Accumulation, buffers, subgroups, delays, and how many collectives a step takes."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.comm.communicator import Comm
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import BufferDtypes
from tests.parity.behaviours.engines import STAGES, Engine, Staged, bare, batch, check, compare, mlp, on_rank, params_of


def train_accumulating(engine: Engine, reduce: str | None, all_inside: bool, clip: bool) -> dict[str, Any]:
    """Three micro-batches; one layer is used in the first of them only, one in none."""
    model = engine.wrap(nn.ModuleList([mlp(), nn.Linear(4, 4), nn.Linear(4, 4)]))
    sgd = engine.optimizer(model, torch.optim.SGD, momentum=0.9)
    norms = []
    for step in range(3):
        for micro in range(3):
            x = batch(10 * step + micro, engine.rank)
            with engine.accumulate(model, reduce) if all_inside or micro < 2 else nullcontext():
                out = bare(model)[0](x)
                ((bare(model)[1](out) if micro == 0 else out).square().mean() / 3).backward()
        if clip:
            norms.append(engine.clip(sgd, model, 0.05))
        sgd.step()
        sgd.zero_grad()
    return {"params": params_of(model), "norms": norms}


@pytest.mark.parametrize(("reduce", "all_inside", "clip"), thinned(["once", "each"], [False, True], [False, True]))
def test_accumulated_gradients_are_those_of_the_whole_batch(reduce: str, all_inside: bool, clip: bool) -> None:
    for ranks in (1, 2, 3):
        check(ranks, train_accumulating, "plain", exact=False, reduce=reduce, all_inside=all_inside, clip=clip)


def test_the_default_way_to_accumulate_gives_the_same_numbers_at_every_stage() -> None:
    """ "once" where gradients are whole, "each" where they are sharded: not the same bits."""
    fields = {"reduce": None, "all_inside": False, "clip": False}
    for results in run_ranks(2, on_rank, train_accumulating, [*STAGES, "plain"], fields):
        for stage in STAGES:
            compare(results[stage], results["plain"], False, f"stage {stage}")


def train_buffers(engine: Engine, buffers: str) -> dict[str, Any]:
    model = engine.wrap(BufferDtypes(12, 6), buffers=buffers)
    adam = engine.optimizer(model)
    for step in range(4):
        model(batch(step, engine.rank)).square().sum().backward()
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            bare(model).eval()(batch(90, engine.rank))
            bare(model).train()
    return {"params": params_of(model), "buffers": {n: b.clone() for n, b in bare(model).named_buffers()}}


@pytest.mark.parametrize("buffers, reference", [("local", "plain"), ("rank0", "ddp")])
def test_buffers_keep_their_dtype_and_follow_the_reference(buffers: str, reference: str) -> None:
    everyone = check(2, train_buffers, reference, buffers=buffers)
    zero, one = (results[2]["buffers"] for results in everyone)
    assert [b.dtype for b in zero.values()] == [b.dtype for b in BufferDtypes(12, 6).buffers()]
    assert zero["norm.num_batches_tracked"] == one["norm.num_batches_tracked"] == 4
    assert not torch.equal(zero["norm.running_mean"], one["norm.running_mean"])  # each saw its own last batch


def train_subgroups(stage: int) -> tuple[Any, Any]:
    """Ranks 0, 2 train one model, ranks 1, 3 another; each pair as a world of two would."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "other"))["shard"]
    engine = Staged(stage)
    team, place = engine.rank % 2, engine.rank // 2
    torch.manual_seed(team)
    model = engine.wrap(mlp(), mesh=mesh)
    torch.manual_seed(team)
    alone = mlp()
    optimizers = [engine.optimizer(model), torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.1)]
    for step in range(3):
        xs = [batch(step, rank) + team for rank in (0, 1)]
        model(xs[place]).square().mean().backward()
        sum(alone(x).square().mean() / 2 for x in xs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return params_of(model), params_of(alone)


def test_each_subgroup_of_a_mesh_trains_its_own_model() -> None:
    everyone = [run_ranks(4, train_subgroups, stage) for stage in STAGES]
    for stage in STAGES:
        for rank, (ours, alone) in enumerate(everyone[stage]):
            compare(ours, everyone[0][rank % 2][0], True, f"stage {stage}, rank {rank}")
            compare(ours, alone, False, f"stage {stage}, rank {rank}, alone")
    assert not torch.equal(everyone[0][0][0]["0.weight"], everyone[0][1][0]["0.weight"])


def count_collectives(stage: int) -> list[tuple[int, dict[str, int]]]:
    model = Staged(stage).wrap(mlp())
    adam = Staged(stage).optimizer(model)
    found = []
    for clip in (False, False, True):
        model(batch(0, dist.get_rank())).square().mean().backward()
        if clip:
            adam.clip_grad_norm(1.0)
        adam.step()
        adam.zero_grad()
        calls = {purpose: flow.calls for (purpose, _), flow in onefold.traffic(model).flows.items()}
        found.append((len(engine_of(model).units), calls))
    return found[1:]  # the first also counts what shard() sent


@pytest.mark.parametrize(("stage", "ranks"), thinned(STAGES, [1, 3]))
def test_a_step_takes_one_reduce_and_one_gather_per_unit_and_one_message_of_flags(stage: int, ranks: int) -> None:
    """Spread values are gathered twice, in forward and in backward, but for the last unit."""
    for found in run_ranks(ranks, count_collectives, stage):
        for clip, (units, calls) in zip((False, True), found, strict=True):
            assert units >= 3
            gathers = {
                0: {"gather-gradient": units},
                1: {"gather-updated": units},
                2: {"gather-updated": units},
                3: {"gather-forward": units, "gather-backward": units - 1},
            }[stage if ranks > 1 else 0]
            assert calls == {"reduce": units, **gathers, "used-flags": 1, **({"norm": 1} if clip else {})}


def train_delayed(engine: Engine) -> dict[str, Any]:
    """The same run twice, the second with ranks that come late at random."""
    reduce, gather = Comm.reduce_scatter, Comm.all_gather
    dice = random.Random(dist.get_rank())
    late = []

    def delayed(call: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            if dice.random() < 0.5:
                late.append(1)
                time.sleep(dice.random() * 0.02)
            return call(*args)

        return wrapper

    results = []
    for delay in (False, True):
        torch.manual_seed(7)
        model = engine.wrap(mlp())
        adam = engine.optimizer(model)
        if delay:
            Comm.reduce_scatter, Comm.all_gather = delayed(reduce), delayed(gather)  # type: ignore[method-assign]
        try:
            for step in range(4):
                model(batch(step, engine.rank)).square().mean().backward()
                engine.clip(adam, model, 0.1)
                adam.step()
                adam.zero_grad()
        finally:
            Comm.reduce_scatter, Comm.all_gather = reduce, gather  # type: ignore[method-assign]
        results.append(params_of(model))
    assert len(late) > 5
    compare(results[1], results[0], True, "delayed")
    return {"params": results[1]}


def test_delays_before_collectives_change_no_bit() -> None:
    check(3, train_delayed)


def train_moved(engine: Engine) -> dict[str, Any]:
    model = engine.wrap(mlp())
    adam = engine.optimizer(model)
    for step in range(3):
        model.to("cpu").float()
        loss = model(batch(step, engine.rank)).square().mean()
        model.to(torch.float32)
        loss.backward()
        model.to("cpu", torch.float32)
        adam.step()
        adam.zero_grad()
    return {"params": params_of(model)}


def test_moving_to_the_same_dtype_and_device_changes_nothing() -> None:
    check(2, train_moved, "plain")
