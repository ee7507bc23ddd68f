"""Above 256 ranks a plan proposes replicas of a sharded model where latency would take most of the messages' time."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import onefold
from benchmarks.rank_of_many import Row, Toy
from onefold.cli.main import main
from onefold.comm.mesh import simulated_axes
from onefold.cost.hardware import hardware
from onefold.cost.hybrid import HybridMesh, propose, ring_seconds
from onefold.cost.recommend import recommend
from onefold.cost.search import Question, fits
from onefold.cost.shapes import named
from onefold.cost.work import Grid, Work
from onefold.optim.elementwise import cost_of
from onefold.planner.answer import answer
from onefold.settings.widths import Widths
from onefold.sharding import shard_over

MIXED = Widths(compute=2, wire=2, grad=2, master=4)
MIB = 1 << 20


def question(ranks: int, **fields: object) -> Question:
    """7.5 billion parameters in units of 32 MiB, on A100s, eight to a node."""
    asked = Question(
        work=Work(widths=MIXED, numel=7_500_000_000, bucket_bytes=32 * MIB), ranks=ranks,
        hardware=hardware("a100-80"), cost=cost_of("adamw"),
    )  # fmt: skip
    return dataclasses.replace(asked, **fields)  # type: ignore[arg-type]


def proposed(asked: Question) -> HybridMesh | None:
    return answer(asked, "7.5B", "bf16").hybrid


@pytest.mark.parametrize("ranks", [8, 256])
def test_up_to_256_ranks_states_are_sharded_over_all(ranks: int) -> None:
    assert proposed(question(ranks)) is None


@pytest.mark.parametrize("ranks", [512, 4096])
def test_above_256_ranks_replicas_are_proposed_with_the_reason_in_one_line(ranks: int) -> None:
    asked = question(ranks)
    found = answer(asked, "7.5B", "bf16")
    mesh = found.hybrid
    assert mesh is not None
    assert mesh.replica * mesh.shard == ranks
    assert mesh.shard % asked.hardware.node_ranks == 0 and mesh.shard <= 256
    assert mesh.message_bytes <= 32 * MIB // ranks
    assert mesh.messages_s < 0.25 * mesh.flat_s
    told = found.proposed_mesh
    assert told.startswith(f"mesh(replica={mesh.replica}, shard={mesh.shard}): ") and "latency" in told
    assert "\n" not in told and told in str(found)
    assert json.loads(json.dumps(found.to_dict()))["hybrid"]["shard"] == mesh.shard


@pytest.mark.parametrize("ranks", [512, 4096])
def test_what_is_proposed_fits_and_is_about_as_fast_as_any(ranks: int) -> None:
    asked = question(ranks)
    chosen = recommend(asked)[0].estimate
    mesh = propose(asked, chosen)
    assert mesh is not None
    priced = asked.price(chosen.choice, Grid(shard=mesh.shard, replica=mesh.replica), mesh.batch)
    assert fits(priced) and priced.peak_bytes == mesh.peak_bytes
    sizes = [size for size in (8, 16, 32, 64, 128, 256) if size < ranks]
    others = [asked.price(chosen.choice, Grid(shard=s, replica=ranks // s), mesh.batch) for s in sizes]
    assert mesh.messages_s == sum(ring_seconds(priced)) <= 1.25 * min(sum(ring_seconds(one)) for one in others)


def test_seconds_are_latencies_of_a_ring_and_bytes_over_links() -> None:
    """Stage 1 of one unit: a reduce-scatter and an all-gather of N-1 messages each, of (N-1)/N of its bytes."""
    wide = Widths(compute=4, wire=4, grad=4, master=0)
    asked = question(512, work=Work(widths=wide, numel=8 * MIB, bucket_bytes=32 * MIB))
    chosen = recommend(asked)[0].estimate
    assert chosen.choice.stage == 1 and len(chosen.sizes.units) == 1
    latency, moving = ring_seconds(chosen)
    assert latency == pytest.approx(2 * 511 * asked.hardware.latency_s)
    assert moving == pytest.approx(2 * 32 * MIB * 511 / 512 / chosen.messages.link("shard"))


def test_seconds_of_a_sum_by_node_are_those_of_an_all_to_all_inside_and_a_ring_between() -> None:
    asked = question(512, work=Work(widths=MIXED, numel=16 * MIB, bucket_bytes=32 * MIB))
    chosen, machine = recommend(asked)[0].estimate, asked.hardware
    latency, moving = ring_seconds(chosen)
    assert latency == pytest.approx((511 + 7 + 63) * machine.latency_s)
    inside, between = (
        32 * MIB * 7 / 8 / machine.node_link,
        64 * MIB / 8 * 63 / 64 / (machine.nics * machine.nic_rate / 8),
    )
    gathered = 32 * MIB * 511 / 512 / chosen.messages.link("shard")
    assert moving == pytest.approx(gathered + inside + between)


def test_nothing_is_proposed_where_a_larger_part_of_the_states_does_not_fit() -> None:
    small = hardware("a100-80", memory_bytes=1_200_000_000)
    asked = question(4096, hardware=small)
    chosen = recommend(asked)[0]
    assert chosen.fits and chosen.estimate.choice.stage == 3
    mesh = propose(asked, chosen.estimate)
    assert mesh is None or mesh.peak_bytes <= 0.95 * small.memory_bytes
    tight = question(4096, hardware=dataclasses.replace(small, memory_bytes=chosen.estimate.peak_bytes * 3 // 2))
    assert propose(tight, chosen.estimate) is None


def test_replicas_that_were_asked_for_stay_as_they_are() -> None:
    assert proposed(question(4096, replica=2)) is None


def test_nothing_is_proposed_where_compute_is_twenty_times_the_messages() -> None:
    shape = dataclasses.replace(named("8b-dp"), seq=1024)
    asked = question(512, work=Work(widths=MIXED, shape=shape, bucket_bytes=32 * MIB), batch=1)
    chosen = recommend(asked)[0].estimate
    assert propose(asked, chosen) is not None
    slow = dataclasses.replace(asked.hardware, flops=asked.hardware.flops / 1000)
    assert propose(asked, dataclasses.replace(chosen, hardware=slow)) is None


@pytest.mark.parametrize("stage", [1, 3])
def test_the_runtime_runs_the_mesh_that_is_proposed(stage: int) -> None:
    mesh = proposed(question(512))
    assert mesh is not None
    model = Toy(3, 2, 64)
    axes = simulated_axes(mesh.shard, plays="nccl", replicas=mesh.replica)
    shard_over(axes, model, None, {"stage": stage, "units": Row})
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1e-3)
    for _ in range(2):
        model(torch.zeros(64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = onefold.traffic(model)
    assert sent.by_purpose["reduce-replica"] == sent.planned["reduce-replica"] > 0


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7.5e9", "--ranks", "512", "--all"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("over mesh(replica=")]
    assert len(lines) == 1 and lines[0].endswith("still fit"), out
