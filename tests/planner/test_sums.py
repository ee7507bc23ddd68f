"""What the planner says of a reduction over NCCL is what the wire does: bytes to peers, scratch, and how it sums."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onefold
from onefold.cli.main import main
from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axis, EchoPeers
from onefold.comm.meter import Label, Meter
from onefold.comm.strategy import Strategy, Sums, over_nccl, pairwise
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import hardware
from onefold.cost.sizes import UnitSize
from onefold.cost.work import Grid, Work
from onefold.optim.elementwise import cost_of
from onefold.settings.precision import Precision
from onefold.state.reduction import Reducer

LABEL = Label("reduce", "unit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CountingPeers(EchoPeers):
    """Simulated peers that count the bytes which this rank hands to NCCL for others."""

    def __init__(self, rank: int, size: int, per_node: int) -> None:
        super().__init__(rank, size)
        self._per_node, self.sent_bytes, self.far_bytes = per_node, 0, 0

    def alltoall(self, received: list[Tensor], sent: list[Tensor], options: Any) -> Any:
        own_node = self._rank // self._per_node
        self.sent_bytes += sum(slot.nbytes for slot in sent)
        self.far_bytes += sum(slot.nbytes for to, slot in enumerate(sent) if to // self._per_node != own_node)
        return super().alltoall(received, sent, options)

    def alltoall_base(self, target: Tensor, source: Tensor, *rest: Any) -> Any:
        self.sent_bytes += source.nbytes - source.nbytes // self._per_node
        return super().alltoall_base(target, source, *rest)

    def _reduce_scatter_base(self, target: Tensor, flat: Tensor, options: Any) -> Any:
        self.sent_bytes += flat.nbytes - target.nbytes
        self.far_bytes += flat.nbytes - target.nbytes
        return super()._reduce_scatter_base(target, flat, options)


def comm_of(nodes: int, per_node: int, rank: int) -> tuple[Comm, CountingPeers]:
    """A communicator over NCCL of so many ranks, whose peers are simulated."""
    ranks = nodes * per_node
    peers: Any = CountingPeers(rank, ranks, per_node)
    comm = Comm(Axis(peers, rank, ranks, tuple(range(ranks)), "nccl", per_node), torch.device("cpu"), 60.0, Meter())
    comm.connect()
    return comm, peers


def estimate(nodes: int, per_node: int, shard: int, precision: Precision) -> Estimate:
    """Stage 2 of one unit, as `onefold plan` prices it."""
    decided = precision.decided(own_sum=True, cuda=True)
    assert isinstance(decided.compute, torch.dtype)
    numel = nodes * per_node * shard
    return Estimate(
        work=Work(
            widths=decided.dtypes(decided.compute).widths, numel=numel, bucket_bytes=8 * numel,
            auto_wire=precision.wire is None,
        ),
        choice=Choice(2), grid=Grid(shard=nodes * per_node), cost=cost_of("adamw"),
        hardware=dataclasses.replace(hardware("h200"), node_ranks=per_node),
    )  # fmt: skip


def unit_of(found: Estimate) -> UnitSize:
    (unit,) = found.sizes.units
    return unit


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 5), per_node=st.integers(1, 8), shard=st.integers(1, 3).map(lambda n: 64 * n),
    compute=st.sampled_from(sorted(DTYPES)), wire=st.sampled_from([None, "same", "fp32"]), data=st.data(),
)  # fmt: skip
def test_the_plan_of_a_reduction_is_what_the_wire_sends_and_borrows(
    nodes: int, per_node: int, shard: int, compute: str, wire: str | None, data: st.DataObject
) -> None:
    onefold.init()
    ranks = nodes * per_node
    given_wire = None if compute == "fp32" else compute if wire == "same" else wire
    precision = Precision(compute=compute, wire=given_wire)
    comm, peers = comm_of(nodes, per_node, data.draw(st.integers(0, ranks - 1)))
    planned = estimate(nodes, per_node, shard, precision)
    unit = unit_of(planned)
    dtypes = precision.decided(own_sum=comm.strategy.own_sum, cuda=True).dtypes(DTYPES[compute])
    assert planned.strategy == comm.strategy and unit.shard == shard
    assert unit.widths.wire == dtypes.wire.itemsize
    scratch = torch.zeros(comm.scratch_numel(shard, dtypes.wire), dtype=dtypes.wire)
    comm.reduce_scatter(torch.ones(ranks * shard, dtype=dtypes.wire), scratch, LABEL)
    row = planned.messages.traffic["reduce"]
    metered = comm.meter.running["reduce", "reduce-scatter"]
    assert row.bytes == metered.sent_bytes == peers.sent_bytes
    if comm.strategy.sums(dtypes.wire.itemsize) is not Sums.BY_NCCL:
        assert row.bytes - row.near_bytes == peers.far_bytes
    assert planned.strategy.scratch_numel(unit.shard, unit.widths.wire) == scratch.numel()


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 8), (32, 1)])
def test_the_buffers_of_a_planned_reduction_are_those_that_the_runtime_borrows(nodes: int, per_node: int) -> None:
    """One reduction: the flat buffer, its scratch, and the fp32 vector of the sum."""
    onefold.init()
    comm, _ = comm_of(nodes, per_node, 0)
    precision = Precision(compute="bf16")
    planned = estimate(nodes, per_node, 192, precision)
    dtypes = precision.decided(own_sum=comm.strategy.own_sum, cuda=True).dtypes(torch.bfloat16)
    layout: Any = dataclasses.make_dataclass("Layout", ["numel", "shard_numel", "shard"])(
        192 * comm.size, 192, lambda rank: None
    )
    alone, _ = comm_of(1, 1, 0)
    pool: Any = None
    assert planned.memory.fullest.buffers == Reducer(layout, comm, alone, pool, dtypes).borrowed_bytes


def test_a_sum_by_node_halves_what_travels_between_few_nodes() -> None:
    by_node, by_nccl = over_nccl(16, 8), Strategy(Sums.BY_NCCL, Sums.BY_NCCL, 16)
    assert by_node.sent_bytes(64, 2) == 64 * (7 * 2 * 2 + 4) and by_nccl.sent_bytes(64, 4) == 64 * 15 * 4
    assert by_node.scratch_numel(64, 2) == 64 * 16 and by_nccl.scratch_numel(64, 4) == 64
    assert pairwise(4).scratch_numel(64, 2) == pairwise(4).scratch_numel(64, 4) == 64 * 3
    assert [strategy.scratch_numel(64, 4) for strategy in (over_nccl(1, 1), pairwise(1))] == [0, 0]


def test_neighbours_that_share_tensors_leave_fewer_ranks_of_the_shard_axis_on_a_node() -> None:
    assert Grid(shard=16, tp=1).shards_per_node(8) == 8
    assert Grid(shard=16, tp=2).shards_per_node(8) == 4
    assert Grid(shard=16, tp=8).shards_per_node(8) == 1
    assert Grid(shard=12, tp=1).shards_per_node(8) == 1  # not as many on each
    assert Grid(shard=4, tp=1).shards_per_node(8) == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ranks", "8"], "16 bits travel, summed in fp32 in rank order (NCCL, 8 ranks, 8 on each node)"),
        (["--ranks", "64"], f"{Sums.BY_NODE.value} (NCCL, 64 ranks, 8 on each node)"),
        (["--ranks", "64", "--hardware", "ethernet"], "fp32 travels, summed by NCCL (NCCL, 64 ranks, 1 on each node)"),
        (["--ranks", "4", "--hardware", "laptop"], "16 bits travel, summed in fp32 in rank order (gloo, 4 ranks)"),
        (["--ranks", "1"], ""),
    ],
)
def test_the_command_says_in_one_line_how_gradients_are_summed(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", "1e9", "--all", *asked]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradients: ")]
    assert lines == [f"gradients: {said}"] * bool(said)
    assert main(["plan", "--params", "1e9", "--json", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["sums"] == said


def test_the_plan_of_a_module_says_how_its_rehearsals_summed() -> None:
    model, sample = torch.nn.Linear(64, 64), torch.zeros(2, 64)
    found = onefold.plan(model, sample, ranks=32, hardware="v100-32", precision="bf16")
    assert found.sums == f"{Sums.BY_NODE.value} (NCCL, 32 ranks, 16 on each node)"
    shard = found.stages[2].messages
    sent = {message.purpose: message.bytes for message in shard}
    assert sent["reduce"] == over_nccl(32, 16).sent_bytes(3 * 64, 2)  # 64·64 weights and 64 biases
    assert f"gradients: {found.sums}" in str(found)
