"""Wires: how bytes move between ranks, one class per backend.

On gloo every rank sends each peer just the slot it needs and receives straight into place: (N-1)/N of the buffer each
way, half of what gloo's own reduce-scatter sends, and no copy of the own slot. The sum runs here, in rank order, so
every stage adds the same numbers in the same order. On NCCL the library's collectives are called.

A new backend is a class with the methods of `Wire`, and a line in `wire_for`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.endpoint import Endpoint, Pending, Reduction
from onefold.comm.meter import Label
from onefold.errors import CommError, ConfigError


class Wire(Protocol):
    """What a communicator asks of a backend. Flat buffers have one slot of equal size per rank."""

    @property
    def any_order(self) -> bool:
        """Whether ranks may receive posted shards in different orders."""

    @property
    def sums_in_rank_order(self) -> bool:
        """Whether reductions add the ranks' numbers in rank order, in fp32."""

    @property
    def small_device(self) -> torch.device:
        """The device of tensors that hold a few bytes."""

    def scratch_numel(self, shard_numel: int) -> int:
        """Elements of scratch that `reduce_scatter` needs."""

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        """Starts to send a shard to some peers, who receive it when they like."""

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        """Starts to receive the shards that peers have posted, each into its slot."""

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        """Starts an all-gather in place."""

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        """Starts a reduce-scatter; overwrites both buffers."""


def wire_for(endpoint: Endpoint, device: torch.device) -> Wire:
    """The wire for tensors on this device over the backend of the axis."""
    backend = endpoint.axis.backend(device)
    if backend == "gloo" and device.type == "cpu":
        return PairwiseWire(endpoint)
    if backend == "nccl":
        return CollectiveWire(endpoint)
    if backend == "gloo":
        return StagedWire(endpoint)
    raise ConfigError(f"{device.type} tensors over {backend}: use gloo for cpu, and nccl or gloo for cuda")


class PairwiseWire:
    """CPU tensors over gloo: each slot is sent by its owner straight to where it is needed, point to point."""

    any_order = sums_in_rank_order = True
    small_device = torch.device("cpu")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def scratch_numel(self, shard_numel: int) -> int:
        return shard_numel * (self._endpoint.size - 1)

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return self.swap({peer: shard for peer in peers}, {}, label)

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._endpoint.size, -1).unbind()
        return self.swap({}, {peer: slots[peer] for peer in self._endpoint.peers}, label)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._endpoint.size, -1).unbind()
        mine, peers = slots[self._endpoint.rank], self._endpoint.peers
        return self.swap({peer: mine for peer in peers}, {peer: slots[peer] for peer in peers}, label)

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        slots = flat.view(self._endpoint.size, -1).unbind()
        received = dict(zip(self._endpoint.peers, scratch.view(len(self._endpoint.peers), -1).unbind(), strict=True))
        parts = [received.get(rank, slots[rank]) for rank in range(self._endpoint.size)]
        return Reduction(self.swap({peer: slots[peer] for peer in self._endpoint.peers}, received, label), parts)

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        """Starts to send and to receive tensors, each with the rank at the other end."""
        group, tag = self._endpoint.axis.group, _tag(label, self._endpoint.salt)
        calls: list[tuple[int, Any, Tensor]] = [(peer, group.recv, tensor) for peer, tensor in receives.items()]
        calls += [(peer, group.send, tensor) for peer, tensor in sends.items()]
        works: list[tuple[int | None, dist.Work]] = []
        gone: dict[int, RuntimeError] = {}
        # All of them, also after an error: peers that live must not wait for this rank because another has died.
        for peer, call, tensor in calls:
            try:
                works.append((peer, call([tensor], peer, tag)))
            except RuntimeError as error:
                gone[peer] = error
        if gone:
            who = ", ".join(f"rank {self._endpoint.world_rank(peer)}" for peer in gone)
            first = next(iter(gone.values()))
            raise CommError(
                f"rank {self._endpoint.world_rank(self._endpoint.rank)}: {label} could not start, {who} has ended; "
                f"look at its output first. The backend says: {str(first).splitlines()[0]}"
            ) from first
        return Pending(self._endpoint, label, works)


class CollectiveWire:
    """CUDA tensors over NCCL's own collectives, in an order that all ranks share."""

    any_order = sums_in_rank_order = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def small_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def scratch_numel(self, shard_numel: int) -> int:
        return shard_numel

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return Pending(self._endpoint, label, ())

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        return self.all_gather(flat, label)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        numel = flat.numel() // self._endpoint.size
        mine = flat[self._endpoint.rank * numel : (self._endpoint.rank + 1) * numel]
        return Pending(self._endpoint, label, [(None, self._endpoint.axis.group._allgather_base(flat, mine))])

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        target = scratch[: flat.numel() // self._endpoint.size]
        work = self._endpoint.axis.group._reduce_scatter_base(target, flat, dist.ReduceScatterOptions())
        return Reduction(Pending(self._endpoint, label, [(None, work)]), (target,))


class StagedWire(CollectiveWire):
    """CUDA tensors over gloo, through host memory: for ranks that share a GPU, which NCCL refuses. Slow, and exact."""

    sums_in_rank_order = True

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._host = PairwiseWire(endpoint)

    def scratch_numel(self, shard_numel: int) -> int:
        return self._host.scratch_numel(shard_numel)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        slots, target = staged.view(self._endpoint.size, -1), flat.view(self._endpoint.size, -1)
        slots[self._endpoint.rank].copy_(target[self._endpoint.rank])
        return Staged(self._host.all_gather(staged, label), staged, flat)

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        staged = torch.empty(scratch.shape, dtype=flat.dtype, pin_memory=True)
        reduction = self._host.reduce_scatter(flat.cpu(), staged, label)
        mine = flat.view(self._endpoint.size, -1)[self._endpoint.rank]
        received = iter(scratch.view(self._endpoint.size - 1, -1))
        parts = [mine if rank == self._endpoint.rank else next(received) for rank in range(self._endpoint.size)]
        return StagedReduction(reduction, parts, staged, scratch)


class Staged(Pending):
    """An all-gather whose result is copied to the GPU once it has completed."""

    def __init__(self, pending: Pending, staged: Tensor, flat: Tensor) -> None:
        super().__init__(pending._endpoint, pending._label, pending._works)
        pending._works = ()  # this object waits for them
        self._staged, self._flat = staged, flat

    def wait(self) -> None:
        super().wait()
        self._flat.copy_(self._staged, non_blocking=True)


class StagedReduction(Reduction):
    """A reduce-scatter whose received parts are copied to the GPU and summed there."""

    def __init__(self, host: Reduction, parts: Sequence[Tensor], staged: Tensor, scratch: Tensor) -> None:
        self._sent = host._parts  # buffers on the host, held until they are sent
        super().__init__(host, parts)
        self._staged, self._scratch = staged, scratch

    def wait(self) -> None:
        super().wait()
        self._scratch.copy_(self._staged, non_blocking=True)


@lru_cache(maxsize=4096)
def _tag(label: Label, salt: int) -> int:
    """A message tag made from model, unit and purpose, so that messages match where ranks issue units in different
    orders."""
    return crc32(str(label).encode(), salt) & 0x3FFFFFFF
