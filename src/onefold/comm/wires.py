"""Wires: how bytes move between ranks, one class per backend.

On gloo every rank sends each peer just the slot it needs and receives straight into place: (N-1)/N of the buffer each
way, half of what gloo's own reduce-scatter sends, and no copy of the own slot. The sum runs here, in rank order, so
every stage adds the same numbers in the same order. On NCCL messages run on streams beside compute.

A new backend is a class with the methods of `Wire`, and a line in `wire_for`. `Comm` asks torch's group itself for
broadcasts, and for a few bytes between hosts, which gloo moves (`_host_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from onefold.comm.directions import downward_group, has_downward_group
from onefold.comm.endpoint import Endpoint, Pending, Reduction
from onefold.comm.last_words import first_words
from onefold.comm.links import GATHER, REDUCE, SWAP, Link, link_of
from onefold.comm.mesh import Axis
from onefold.comm.meter import Label
from onefold.comm.nodes import node_axes
from onefold.comm.strategy import Strategy, Sums, over_nccl, pairwise
from onefold.comm.streams import StreamEvent
from onefold.comm.sums import sum_wide
from onefold.comm.watching import check_watcher, current_watcher
from onefold.errors import CommError, ConfigError

_GATHERING, _EXCHANGING, _REDUCING = AllgatherOptions(), AllToAllOptions(), ReduceScatterOptions()
for _options in (_GATHERING, _EXCHANGING, _REDUCING):
    _options.asyncOp = False  # NCCL's kernel then runs on the current stream: that of the link


class Wire(Protocol):
    """What a communicator asks of a backend. Flat buffers have one slot of equal size per rank."""

    @property
    def any_order(self) -> bool:
        """Whether ranks may receive posted shards in different orders."""

    @property
    def on_host(self) -> bool:
        """Whether it moves tensors in host memory; else on a GPU."""

    @property
    def strategy(self) -> Strategy:
        """How gradients are summed."""

    @property
    def on_stream(self) -> bool:
        """Whether messages run on CUDA streams and no call waits for them on the host; else `Pending.wait` does."""

    @property
    def connected(self) -> bool:
        """Whether this rank has the groups for which `connect` would need a name."""

    def connect(self, per_node: int, name: str) -> None:
        """Makes the connections that messages will need, and decides how to sum where each node has so many of the
        ranks. A group that all ranks must name alike gets this name; "": all ranks are `connected`. Collective."""

    def connect_swaps(self) -> None:
        """Makes the connections that `swap` will need. Collective."""

    def scratch_numel(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Elements of scratch that `reduce_scatter` of this dtype needs."""

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        """Starts to send a shard to some peers, who receive it when they like."""

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        """Starts to receive the shards that peers have posted, each into its slot."""

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        """Starts an all-gather in place."""

    def reductions_wait(self) -> None:
        """Makes reductions that start later wait for what the current stream holds now, if they have a stream."""

    def reduce_stream(self, after: StreamEvent) -> AbstractContextManager[None]:
        """Inside, what is enqueued runs beside compute behind earlier reductions, if they have a stream: once `after`
        has passed."""

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        """Starts a reduce-scatter; overwrites both buffers."""

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        """Starts to send and to receive tensors of any sizes, each with the rank at the other end."""


def wire_for(endpoint: Endpoint, device: torch.device, timeout_s: float, *, one_link: str | None = None) -> Wire:
    """The wire for tensors on this device over the backend of the axis. With `one_link`, all
    messages are issued in one common order, and share the link of that kind where there are several."""
    backend = endpoint.axis.backend(device)
    if backend == "gloo" and device.type == "cpu":
        return PairwiseWire(endpoint)
    if backend == "nccl":
        return NcclWire(endpoint, device, timeout_s, one_link=one_link)
    if backend == "gloo":
        return StagedWire(endpoint)
    raise ConfigError(f"{device.type} tensors over {backend}: use gloo for cpu, and nccl or gloo for cuda")


class PairwiseWire:
    """CPU tensors over gloo: each slot is sent by its owner straight to where it is needed, point to point."""

    any_order, on_host, on_stream = True, True, False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self.strategy = endpoint, pairwise(endpoint.size)
        self._up = self._down = endpoint.axis.group  # messages to higher and to lower ranks

    @property
    def connected(self) -> bool:
        return has_downward_group(self._endpoint.axis)

    def connect(self, per_node: int, name: str) -> None:
        self._down = downward_group(self._endpoint.axis, name, self._endpoint.timeout.total_seconds())

    def connect_swaps(self) -> None:
        pass

    def scratch_numel(self, shard_numel: int, dtype: torch.dtype) -> int:
        return self.strategy.scratch_numel(shard_numel, dtype.itemsize)

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return self.swap({peer: shard for peer in peers}, {}, label)

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._endpoint.size, -1).unbind()
        return self.swap({}, {peer: slots[peer] for peer in self._endpoint.peers}, label)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._endpoint.size, -1).unbind()
        mine, peers = slots[self._endpoint.rank], self._endpoint.peers
        return self.swap({peer: mine for peer in peers}, {peer: slots[peer] for peer in peers}, label)

    def reductions_wait(self) -> None:
        pass

    def reduce_stream(self, after: StreamEvent) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        slots = flat.view(self._endpoint.size, -1).unbind()
        received = dict(zip(self._endpoint.peers, scratch.view(len(self._endpoint.peers), -1).unbind(), strict=True))
        parts = [received.get(rank, slots[rank]) for rank in range(self._endpoint.size)]
        return Reduction(self.swap({peer: slots[peer] for peer in self._endpoint.peers}, received, label), parts)

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        """Starts to send and to receive tensors, each with the rank at the other end."""
        rank, tag, up, down = self._endpoint.rank, _tag(label, self._endpoint.salt), self._up, self._down
        calls: list[tuple[int, Any, Tensor]] = [
            (peer, (up if peer < rank else down).recv, tensor) for peer, tensor in receives.items()
        ]
        calls += [(peer, (up if rank < peer else down).send, tensor) for peer, tensor in sends.items()]
        works: list[tuple[int | None, dist.Work]] = []
        gone: dict[int, RuntimeError] = {}
        # All of them, also after an error: peers that live must not wait for this rank because another has died.
        for peer, call, tensor in calls:
            try:
                works.append((peer, call([tensor], peer, tag)))
            except RuntimeError as error:
                gone[peer] = error
        if gone:
            lost = [self._endpoint.world_rank(peer) for peer in gone]
            if (watcher := current_watcher()) is not None:
                watcher.explain(lost[0])
            who = ", ".join(f"rank {rank}" for rank in lost)
            first, words = next(iter(gone.values())), first_words()
            raise CommError(
                f"rank {self._endpoint.world_rank(self._endpoint.rank)}: {f'{words}. Here ' if words else ''}{label} "
                f"could not start, {who} has ended; look at its output first. The backend says: "
                f"{str(first).splitlines()[0]}"
            ) from first
        return Pending(self._endpoint, label, works)


class NcclWire:
    """CUDA tensors over NCCL. All ranks issue all-gathers in one order, reduce-scatters in another, swaps in a third.

    Messages run on the streams of their links (links.py), after what the current stream holds when they are issued, and
    the host never waits for them. How gradients are summed is decided by strategy.py.
    """

    any_order = on_host = False
    on_stream = True

    def __init__(self, endpoint: Endpoint, device: torch.device, timeout_s: float, *, one_link: str | None) -> None:
        self._endpoint, self._device, self._timeout_s = endpoint, device, timeout_s
        self._gather, self._reduce, self._swap = (one_link,) * 3 if one_link else (GATHER, REDUCE, SWAP)
        self._links: dict[tuple[Axis | None, str], Link] = {}  # None: of this endpoint's own axis
        self.strategy = over_nccl(endpoint.size, 1)
        self._near = self._far = endpoint.axis

    connected = True

    def connect(self, per_node: int, name: str) -> None:
        self.strategy = over_nccl(self._endpoint.size, per_node)
        for kind in (self._gather, self._reduce):
            self._link(kind)
        if self.strategy.narrow is Sums.BY_NODE:
            self._near, self._far = node_axes(self._endpoint.axis, per_node)
            for axis in (self._near, self._far):
                self._link(self._reduce, axis)

    def connect_swaps(self) -> None:
        self._link(self._swap)

    def _link(self, kind: str, axis: Axis | None = None) -> Link:
        check_watcher()
        link = self._links.get((axis, kind))
        if link is None:
            link = link_of(axis or self._endpoint.axis, kind, self._device, self._timeout_s)
            self._links[axis, kind] = link
        return link

    def scratch_numel(self, shard_numel: int, dtype: torch.dtype) -> int:
        return self.strategy.scratch_numel(shard_numel, dtype.itemsize)

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return Pending(self._endpoint, label, ())

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        return self.all_gather(flat, label)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        link, numel = self._link(self._gather), flat.numel() // self._endpoint.size
        mine = flat[self._endpoint.rank * numel : (self._endpoint.rank + 1) * numel]
        with link.stream.after_current(), link.explained(label):
            link.group._allgather_base(flat, mine, _GATHERING)
            return link.pending(self._endpoint, label)

    def reductions_wait(self) -> None:
        self._link(self._reduce).stream.wait_for_current()

    def reduce_stream(self, after: StreamEvent) -> AbstractContextManager[None]:
        return self._link(self._reduce).stream.after(after)

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        link, sums = self._link(self._reduce), self.strategy.sums(flat.itemsize)
        with link.stream.after_current(), link.explained(label):
            if sums is Sums.BY_NCCL:
                parts = [scratch[: flat.numel() // self._endpoint.size]]
                link.group._reduce_scatter_base(parts[0], flat, _REDUCING)
            elif sums is Sums.IN_RANK_ORDER:
                parts = self._exchange(link, flat, scratch)
            else:
                parts = [self._sum_by_node(flat, scratch)]
            return Reduction(link.pending(self._endpoint, label), parts)

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        link, ranks = self._link(self._swap), range(self._endpoint.size)
        with link.stream.after_current(), link.explained(label):
            nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
            received = [receives.get(rank, nothing) for rank in ranks]
            link.group.alltoall(received, [sends.get(rank, nothing) for rank in ranks], _EXCHANGING)
            return link.pending(self._endpoint, label, [*sends.values()])

    def _exchange(self, link: Link, flat: Tensor, scratch: Tensor) -> list[Tensor]:
        """An all-to-all: this rank's slot of every rank's buffer, in rank order."""
        size, rank = self._endpoint.size, self._endpoint.rank
        slots, received = list(flat.view(size, -1)), list(scratch.view(size - 1, -1))
        nothing = slots[rank][:0]  # for this rank itself
        sent = [*slots[:rank], nothing, *slots[rank + 1 :]]
        link.group.alltoall([*received[:rank], nothing, *received[rank:]], sent, _EXCHANGING)
        return [*received[:rank], slots[rank], *received[rank:]]

    def _sum_by_node(self, flat: Tensor, scratch: Tensor) -> Tensor:
        """Sums over the ranks of a node by an all-to-all in 16 bits, then over nodes by NCCL in fp32."""
        near, far = self._near.size, self._far.size
        scratch.view(near, far, -1).copy_(flat.view(far, near, -1).transpose(0, 1))
        self._link(self._reduce, self._near).group.alltoall_base(flat, scratch, [], [], _EXCHANGING)
        wide = scratch.view(torch.float32)
        of_node = wide[: flat.numel() // near]  # the node's sum of the slots that go to this rank's place on each node
        sum_wide(list(flat.view(near, -1)), of_node, None, 1.0, of_node)
        total = wide[of_node.numel() :][: flat.numel() // self._endpoint.size]
        self._link(self._reduce, self._far).group._reduce_scatter_base(total, of_node, _REDUCING)
        return total


class StagedWire:
    """CUDA tensors over gloo, through host memory: for ranks that share a GPU, which NCCL refuses. Slow, and exact."""

    any_order = on_host = on_stream = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._host = endpoint, PairwiseWire(endpoint)
        self.strategy = self._host.strategy

    connected = True

    def connect(self, per_node: int, name: str) -> None:
        pass

    def connect_swaps(self) -> None:
        pass

    def scratch_numel(self, shard_numel: int, dtype: torch.dtype) -> int:
        return self._host.scratch_numel(shard_numel, dtype)

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return Pending(self._endpoint, label, ())

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        return self.all_gather(flat, label)

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        slots, target = staged.view(self._endpoint.size, -1), flat.view(self._endpoint.size, -1)
        slots[self._endpoint.rank].copy_(target[self._endpoint.rank])
        return Staged(self._host.all_gather(staged, label), staged, flat)

    def reductions_wait(self) -> None:
        pass

    def reduce_stream(self, after: StreamEvent) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        staged = torch.empty(scratch.shape, dtype=flat.dtype, pin_memory=True)
        reduction = self._host.reduce_scatter(flat.cpu(), staged, label)
        mine = flat.view(self._endpoint.size, -1)[self._endpoint.rank]
        received = iter(scratch.view(self._endpoint.size - 1, -1))
        parts = [mine if rank == self._endpoint.rank else next(received) for rank in range(self._endpoint.size)]
        return Reduction(Staged(reduction.pending, staged, scratch, holds=reduction.parts), parts)

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        sent = {peer: tensor.cpu() for peer, tensor in sends.items()}
        staged = {peer: torch.empty_like(tensor, device="cpu") for peer, tensor in receives.items()}
        self._host.swap(sent, staged, label).wait()
        for peer, tensor in receives.items():
            tensor.copy_(staged[peer])
        return Pending(self._endpoint, label, ())


class Staged(Pending):
    """A message through host memory, whose result is copied to the GPU once it has completed."""

    def __init__(self, pending: Pending, staged: Tensor, target: Tensor, holds: Sequence[Tensor] = ()) -> None:
        super().__init__(pending._endpoint, pending._label, pending._works)
        pending._works = ()  # this object waits for them
        self._staged, self._target, self._holds = staged, target, holds

    def wait(self) -> None:
        super().wait()
        self._target.copy_(self._staged, non_blocking=True)


@lru_cache(maxsize=4096)
def _tag(label: Label, salt: int) -> int:
    """A message tag made from model, unit and purpose, so that messages match where ranks issue units in different
    orders."""
    return crc32(str(label).encode(), salt) & 0x3FFFFFFF
