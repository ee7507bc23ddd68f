"""How much is kept where, and what is sent for it: to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import onefold
from onefold.runtime.engine import engine_of
from tests.activations.runs import BATCH, DIM, INPUT_BYTES, LAYERS, SEQ, batch, made, mesh_of, train
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import ManyInputs, ManyInputsNet, MegatronPairs, Narrowing, Summed

WIDE = {"bucket_bytes": 32 << 20}


@pytest.mark.parametrize(
    ("policy", "ranks", "device", "host"),
    [
        ("keep", 1, 0, 0),
        ("checkpoint", 1, 1, 0),
        ("checkpoint+host", 1, 0, 1),
        ("partition", 2, 1 / 2, 0),
        ("partition+host", 2, 0, 1 / 2),
        ("partition", 4, 1 / 4, 0),
    ],
)
def test_each_rank_keeps_its_part_of_the_block_inputs_in_its_place(policy, ranks, device, host):
    for found in run_ranks(ranks, train, policy, 2, True):
        inputs = LAYERS * INPUT_BYTES
        for kept, part in ((found.memory.checkpoints, device), (found.memory.checkpoints_host, host)):
            assert kept.measured == kept.planned == part * inputs
        sent = found.traffic.by_purpose.get("activation", 0)
        assert sent == (inputs * (ranks - 1) // ranks if policy.startswith("partition") else 0)
        assert found.traffic.planned.get("activation", 0) == sent
        calls = {flow.calls for (purpose, _), flow in found.traffic.flows.items() if purpose == "activation"}
        assert calls == ({LAYERS} if policy.startswith("partition") else set()), "one gather per block"


@pytest.mark.parametrize(("policy", "parts"), [("checkpoint", 1), ("partition", 2)])
def test_an_input_of_many_blocks_is_kept_once(policy, parts):
    for found in run_ranks(parts, train, policy, 2, True, shared=True):
        assert found.memory.checkpoints.measured == (LAYERS + 1) * INPUT_BYTES // parts


def test_every_second_block_keeps_half():
    (found,) = run_ranks(1, train, "checkpoint", 2, True, checkpoint_every=2)
    assert found.memory.checkpoints.measured == LAYERS // 2 * INPUT_BYTES


def odd_sizes(policy: str) -> list[int]:
    """The bytes of the part and of all parts, for an input of 3 × 7 × 5 = 105 elements."""
    model, optimizer = made(policy, model=ManyInputsNet(layers=2, dim=5))
    rows = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    model(rows).square().mean().backward()
    kept = onefold.memory(model).checkpoints.measured
    optimizer.step()
    return [kept, onefold.traffic(model).by_purpose.get("activation", 0)]


def test_parts_are_whole_vectors_whatever_the_size():
    assert run_ranks(1, odd_sizes, "checkpoint") == [[2 * 128 * 4, 0]]
    assert run_ranks(2, odd_sizes, "partition") == [[2 * 64 * 4, 2 * 64 * 4]] * 2


# -- the arena ---------------------------------------------------------------------------------------------------------


def stretches(policy: str, plan: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """After steps of so many forwards of so many rows: where the arena lies, and how long it is."""
    model, optimizer = made(policy)
    arena, seen = engine_of(model).checkpoints.arena, []
    for forwards, rows in plan:
        losses = [model(batch(i, 0, rows)).square().mean() for i in range(forwards)]
        sum(losses).backward()
        assert arena.in_use == 0
        seen.append((arena.tensors()[0].data_ptr(), sum(t.nbytes for t in arena.tensors())))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("policy", ["checkpoint", "checkpoint+host"])
def test_the_arena_is_as_long_as_needed_and_stays_where_it_is(policy):
    once, rows = LAYERS * INPUT_BYTES, BATCH
    (found,) = run_ranks(1, stretches, policy, [(1, rows)] * 3 + [(3, rows), (1, rows), (1, 2 * rows), (3, rows)])
    places, lengths = zip(*found)
    assert lengths == (once, once, once, once, 3 * once, 3 * once, 3 * once)
    assert len(set(places[:4])) == len(set(places[4:])) == 1


def narrowing() -> list[int]:
    model, optimizer = made("checkpoint", model=Narrowing(), units=lambda name, _: name.startswith("blocks."))
    seen = []
    for _ in range(3):
        model(torch.randn(64, DIM)).sum().backward()
        seen.append(onefold.memory(model).checkpoints.measured)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_guess_that_was_too_long_is_put_right_after_one_step():
    row = DIM * 4
    (found,) = run_ranks(1, narrowing)
    assert found == [3 * 64 * row, (64 + 32 + 16) * row, (64 + 32 + 16) * row]


# -- constant buffers (C_B) --------------------------------------------------------------------------------------------


def buffers(layers: int, policy: str, precision: str) -> dict[str, int]:
    """Constant buffers after steps that clip and look for overflow, and what the activations need at the peak beyond
    the checkpoints."""
    torch.manual_seed(0)
    scale = {"loss_scale": onefold.LossScale(initial=1.0)} if precision == "fp16" else {}
    onefold.init()
    model = onefold.shard(
        ManyInputsNet(layers),
        stage=2,
        precision=precision,
        activations=policy,
        mesh=mesh_of(policy),
        bucket_bytes=1 << 20,
        units=ManyInputs,
    )
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1e-3, **scale)
    for step in range(3):
        with onefold.track_memory(model) as tracker:
            optimizer.backward(model(batch(step, 0)).float().square().mean())
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.peak()
    moving = peak["activations"] if policy != "keep" else 0
    return {"communication": onefold.memory(model).communication.measured, "moving": moving}


@pytest.mark.parametrize(("policy", "precision"), thinned(["keep", "checkpoint", "partition+host"], ["fp32", "fp16"]))
def test_eight_times_the_depth_needs_no_more_buffers(policy, precision):
    """Neither for reductions, nor for norms and overflow checks, nor for blocks that are computed again."""
    shallow, deep = (run_ranks(2, buffers, layers, policy, precision)[0] for layers in (4, 32))
    assert deep["communication"] == shallow["communication"]
    assert deep["moving"] <= shallow["moving"] * 1.02


def peak_of(policy: str) -> int:
    model, optimizer = made(policy, **WIDE)
    for step in range(3):
        with onefold.track_memory(model) as tracker:
            model(batch(step, dist.get_rank() if policy.startswith("ch") else 0, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.peak_bytes


def test_on_the_host_the_peak_grows_by_two_inputs_at_most():
    """One in use and one on its way, of eight blocks."""
    assert SEQ * DIM * 4 * 32 > 30_000
    (kept,), (away,) = (run_ranks(1, peak_of, policy) for policy in ("checkpoint", "checkpoint+host"))
    saved: Any = kept - away
    assert saved >= (LAYERS - 2) * INPUT_BYTES // BATCH * 32


# -- beside tensor parallelism -----------------------------------------------------------------------------------------


def shares(early_stop: bool) -> float:
    """What sharing inputs sends, over what tensor parallelism sends: both in a ring."""
    model, optimizer = made(
        "partition", model=nn.Sequential(nn.Linear(DIM, DIM), *(MegatronPairs(DIM) for _ in range(3)))
    )
    for step in range(2):
        Summed.total_bytes = 0
        with set_checkpoint_early_stop(early_stop):
            model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks = dist.get_world_size()
    return onefold.traffic(model).by_purpose["activation"] / (2 * Summed.total_bytes * (ranks - 1) / ranks)


@pytest.mark.parametrize(("early_stop", "share"), [(False, 1 / 12), (True, 1 / 10)])
def test_sharing_inputs_adds_a_twelfth_to_the_traffic_of_tensor_parallelism(early_stop: bool, share: float) -> None:
    """Six sums of b·s·h per block, where recomputation repeats both; torch leaves out the last, which nothing needs."""
    assert run_ranks(2, shares, early_stop) == [pytest.approx(share)] * 2
