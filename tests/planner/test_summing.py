"""The bytes that a plan counts for sums over ranks are those that the runtime's kernels read and write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axis, NoPeers
from onefold.comm.meter import Meter
from onefold.comm.strategy import Sums
from onefold.cost.layout import Span
from onefold.cost.summing import moved_per_gradient, summed
from onefold.settings.precision import Precision
from onefold.state.reduction import Reducer

CPU = torch.device("cpu")
KERNELS = ("copy_", "add_", "add", "mul_", "mul")
SHARD = 256


class Moved(TorchDispatchMode):
    """Counts the bytes that copies, sums and products read and write."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in KERNELS:
            read = args[1:] if name == "copy_" else args
            self.nbytes += found.nbytes + sum(one.nbytes for one in read if isinstance(one, Tensor) and one.dim())
        return found


def comm_of(ranks: int, per_node: int, plays: str) -> Comm:
    """A communicator of so many ranks, whose peers are not there and whose messages do nothing."""
    peers: Any = NoPeers()
    comm = Comm(Axis(peers, 0, ranks, tuple(range(ranks)), plays, per_node), CPU, 60.0, Meter())
    comm.connect()
    return comm


def reducer_of(comm: Comm, replicas: Comm, compute: str) -> tuple[Reducer, Any]:
    """What sums the gradients of a unit that computes so, and the dtypes of that unit."""
    precision = Precision(compute=compute).decided(own_sum=comm.strategy.own_sum, cuda=not comm.on_host)
    dtypes = precision.dtypes(torch.bfloat16 if compute == "bf16" else torch.float32)
    layout: Any = dataclasses.make_dataclass("Layout", ["name", "numel", "shard_numel", "shard"])(
        "unit", SHARD * comm.size, SHARD, lambda rank: Span(0, SHARD)
    )
    return Reducer(layout, comm, replicas, Pool(CPU), dtypes), dtypes


CASES = [
    (1, 1, 1, "nccl", "bf16"), (2, 2, 1, "nccl", "bf16"), (8, 8, 1, "nccl", "bf16"), (64, 8, 1, "nccl", "bf16"),
    (24, 4, 1, "nccl", "bf16"), (32, 1, 1, "nccl", "bf16"), (4, 4, 1, "nccl", "fp32"), (2, 2, 1, "gloo", "bf16"),
    (4, 4, 1, "gloo", "fp32"), (8, 8, 2, "nccl", "bf16"), (1, 1, 4, "nccl", "bf16"), (1, 1, 4, "nccl", "fp32"),
    (2, 2, 4, "gloo", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "per_node", "replicas", "plays", "compute"), CASES)
def test_a_sum_over_ranks_moves_the_bytes_that_the_plan_counts(
    ranks: int, per_node: int, replicas: int, plays: str, compute: str
) -> None:
    onefold.init()
    comm, across = comm_of(ranks, per_node, plays), comm_of(replicas, 1, plays)
    reducer, dtypes = reducer_of(comm, across, compute)
    flat, own = torch.zeros(SHARD * ranks, dtype=dtypes.wire), torch.zeros(SHARD, dtype=dtypes.grad)
    with Moved() as moved:
        if ranks * replicas > 1:
            reducer.sum(reducer.start(flat), own, add=False)
    by_nccl = {  # what its own reduce-scatter reads and writes, which no operator of torch says
        Sums.BY_NCCL: dtypes.wire.itemsize * (1 + 1 / ranks) * (ranks > 1),
        Sums.BY_NODE: 4 * (1 + per_node / ranks) / per_node,
    }.get(comm.strategy.sums(dtypes.wire.itemsize), 0.0)
    by_nccl += 4 * (1 + 1 / replicas) / ranks * (replicas > 1 and plays == "nccl")
    counted = summed(dtypes.widths, comm.strategy, replicas)
    assert moved.nbytes / flat.numel() == pytest.approx(counted - by_nccl)
    assert moved_per_gradient(dtypes.widths, comm.strategy, replicas=replicas, flat=False) == counted


def test_a_gradient_is_copied_into_the_buffer_that_travels_and_a_sum_over_micro_batches_once_more() -> None:
    onefold.init()
    comm, alone = comm_of(8, 8, "nccl"), comm_of(1, 1, "nccl")
    reducer, dtypes = reducer_of(comm, alone, "bf16")
    counted = summed(dtypes.widths, comm.strategy)
    assert moved_per_gradient(dtypes.widths, comm.strategy) == counted + 2 + 2
    with Moved() as moved:
        local, own = torch.zeros(SHARD * 8), torch.zeros(SHARD, dtype=dtypes.grad)
        local.add_(torch.zeros(SHARD * 8, dtype=torch.bfloat16))
        reducer.sum(reducer.start(local), own, add=False)
    found = moved_per_gradient(dtypes.widths, comm.strategy, accumulates=True)
    assert moved.nbytes / local.numel() == pytest.approx(found)
