"""Communicators, the only callers of collectives: each call is metered by purpose, and named in errors.

`all_gather` works in place: it fills a flat buffer of N equal slots, of which each rank has filled its own.
`reduce_scatter` gives the sum of this rank's slot over all ranks. `broadcast` copies rank 0's bytes to all.

An all-gather has two halves: `post_shard` starts to send this rank's slot to its peers, `receive_shards` receives
theirs. On gloo a message travels once both sides have called, moved by gloo's own thread: after a rank has posted its
shards, its peers receive them when they like and in any order, without waiting for what that rank is doing. On NCCL
`receive_shards` is the whole all-gather, in the same order on all ranks.

Each backend has a wire (wires.py). One rank sends nothing: N - 1 = 0 messages.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.endpoint import Endpoint, Pending, Reduction
from onefold.comm.links import BOTH
from onefold.comm.maximum import Maximum, bytes_tensor, tensor_bytes
from onefold.comm.mesh import Axes, Axis, new_gloo_axis
from onefold.comm.meter import Label, Meter
from onefold.comm.nodes import ranks_per_node
from onefold.comm.strategy import Strategy, max_rounds
from onefold.comm.streams import StreamEvent
from onefold.comm.wires import PairwiseWire, wire_for
from onefold.errors import CommError


class Comm(Endpoint):
    """Collectives over one axis of a mesh."""

    def __init__(
        self, axis: Axis, device: torch.device, timeout_s: float, meter: Meter, *, one_link: str | None = None
    ) -> None:
        super().__init__(axis, timeout_s)
        self.meter = meter
        self.simulated = axis.plays is not None  # no peers: each is taken to send what this rank sends
        self._device, self._wire = device, wire_for(self, device, timeout_s, one_link=one_link)
        self._hosts = self._host_wire()  # for a few bytes between hosts, which need no device

    def _host_wire(self) -> PairwiseWire | None:
        """The gloo wire for host memory: that of this group, or one beside NCCL. None if the group has no gloo."""
        if isinstance(self._wire, PairwiseWire):
            return self._wire
        try:
            gloo = not self.simulated and self.axis.backend(torch.device("cpu")) == "gloo"
        except RuntimeError:  # a group that the user made, of NCCL alone
            gloo = False
        return PairwiseWire(self) if gloo else None

    def connect(self) -> None:
        """Makes the connections that messages of a step will need, so that none is made in a step. Collective."""
        if self.size > 1:
            mine = ranks_per_node(self.axis)
            said = bytes([self._wire.connected]) + mine.to_bytes(4, "big")
            kinds = set(self.all_gather_bytes(said, Label("agree", "how messages move")))
            name, per_node = "", mine if len({kind[1:] for kind in kinds}) == 1 else 1
            if not all(kind[0] for kind in kinds):
                name = f"down/{self.broadcast_bytes(os.urandom(8), Label('agree', 'how messages move')).hex()}"
            with self._joining("messages to lower ranks") if name else nullcontext():
                self._wire.connect(per_node, name)

    def connect_swaps(self) -> None:
        """Makes the connections that `swap` will need. Collective."""
        if self.size > 1:
            self._wire.connect_swaps()

    def scratch_numel(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Elements of scratch that `reduce_scatter` of this dtype needs beside its buffer."""
        return self._wire.scratch_numel(shard_numel, dtype) if self.size > 1 else 0

    @property
    def on_stream(self) -> bool:
        """Whether messages run on CUDA streams of their own and the host never waits for them; not for one rank."""
        return self.size > 1 and self._wire.on_stream

    def reductions_wait(self) -> None:
        """Makes reductions that start later wait for what the current CUDA stream holds now, where they have one."""
        if self.size > 1:
            self._wire.reductions_wait()

    def reduce_stream(self, after: StreamEvent) -> AbstractContextManager[None]:
        """Inside, kernels are enqueued beside compute, behind earlier reductions and an event, where messages run on
        CUDA streams. What is allocated inside must be used on that stream alone, or ordered by `reductions_wait`."""
        return self._wire.reduce_stream(after) if self.size > 1 else nullcontext()

    @property
    def on_host(self) -> bool:
        """Whether it moves tensors in host memory; else on a GPU, be it a simulated one."""
        return self._wire.on_host

    @property
    def any_order(self) -> bool:
        """Whether ranks may receive posted shards in different orders: for point-to-point messages
        of CPU tensors over gloo, not for NCCL, and not for CUDA tensors staged over gloo."""
        return self._wire.any_order

    @property
    def strategy(self) -> Strategy:
        """How gradients are summed over ranks."""
        return self._wire.strategy

    def post_shard(self, shard: Tensor, label: Label, to: Sequence[int] | None = None) -> Pending:
        """Starts to send this rank's shard to all peers, or to some. It must not change before `wait` has returned."""
        peers = self.peers if to is None else [peer for peer in to if peer != self.rank]
        self.posted.sent += to is None
        self.meter.count(label.purpose, "all-gather", shard.nbytes * len(peers))
        with self.span("start", label):
            pending = self._wire.post_shard(shard, label, peers)
        pending.is_posted_shard = to is None
        return pending

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        """Starts to receive the peers' shards into their slots of a flat buffer; this rank's slot is filled already."""
        with self.span("start", label):
            pending = self._wire.receive_shards(flat, label)
        self.posted.received += 1  # not if it could not start: peers would wait for ever
        return pending

    def all_gather(self, flat: Tensor, label: Label) -> Pending:
        """Starts an all-gather in place: each rank has filled its own slot of the flat buffer."""
        self._count(label, "all-gather", flat)
        if self.size == 1:
            return Pending(self, label, ())
        with self.span("start", label):
            return self._wire.all_gather(flat, label)

    def reduce_scatter(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        """Starts a reduce-scatter: the sum of this rank's slot over all ranks. Overwrites `flat` and `scratch`."""
        sent = self.strategy.sent_bytes(flat.numel() // self.size, flat.itemsize)
        self.meter.count(label.purpose, "reduce-scatter", sent)
        if self.size == 1:
            return Reduction(Pending(self, label, ()), [flat])
        with self.span("start", label):
            return self._wire.reduce_scatter(flat, scratch, label)

    def swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        """Starts to send vectors to some ranks and to receive vectors from some, of any sizes and dtypes. Every rank
        calls it, also with nothing to send; what one rank sends another receives. Swaps have an order of their own,
        the same on all ranks."""
        self.meter.count(label.purpose, "all-to-all", sum(tensor.nbytes for tensor in sends.values()))
        if self.size == 1:
            return Pending(self, label, ())
        with self.span("start", label):
            return self._wire.swap(_as_bytes(sends), _as_bytes(receives), label)

    def broadcast(self, tensors: Sequence[Tensor], label: Label) -> None:
        """Copies rank 0's tensors to all ranks, in one message, whatever their dtypes."""
        tensors = [_unexpanded(tensor.detach()) for tensor in tensors if tensor.numel()]
        if self.size == 1 or self.simulated or not tensors:
            return
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat = _bytes(tensors[0])
        else:
            flat = torch.cat([_bytes(tensor.contiguous()) for tensor in tensors])
        self.meter.count(label.purpose, "broadcast", 0 if self.rank else flat.numel() * (self.size - 1))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self.span("wait", label):
            work = self.axis.group.broadcast([flat], options)
            work.wait() if self.on_stream else self.finish(work, label, 0 if self.rank else None)
        if flat.data_ptr() != tensors[0].data_ptr():
            pieces = flat.split([tensor.nbytes for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                aligned = piece.clone() if piece.storage_offset() % tensor.itemsize else piece
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))

    def exchange(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order, of any lengths: two all-gathers, for set-up rather than for steps."""
        sizes = self.all_gather_bytes(len(blob).to_bytes(8, "big"), label)
        lengths = [int.from_bytes(size, "big") for size in sizes]
        rows = self.all_gather_bytes(blob.ljust(max(lengths), b"\0"), label)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def gather_to_rank0(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order, on rank 0; an empty list elsewhere. On gloo only."""
        assert isinstance(self._wire, PairwiseWire)
        sizes = [int.from_bytes(size, "big") for size in self.all_gather_bytes(len(blob).to_bytes(8, "big"), label)]
        boxes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        boxes[self.rank].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else boxes[self.rank])
        filled = {peer: box for peer, box in enumerate(boxes) if peer and box.numel()}
        mine = {0: filled[self.rank]} if self.rank in filled else {}
        self.meter.count(label.purpose, "gather", len(blob) if self.rank else 0)
        self._wire.swap(mine, {} if self.rank else filled, label).wait()
        return [] if self.rank else [ctypes.string_at(box.data_ptr(), box.numel()) for box in boxes]

    def new_gloo_group(self, name: str, timeout_s: float) -> Comm:
        """A communicator of the same ranks over a new gloo group, for use in another thread. Collective."""
        meter, self.meter = self.meter, Meter()  # these messages belong to no step
        try:
            with self._joining(name):
                self.all_gather_bytes(b"!", Label("meet", name))  # raises at once if a peer has ended
                axis = new_gloo_axis(self.axis, f"{name}/{self.salt}", self.timeout.total_seconds())
        finally:
            self.meter = meter
        return Comm(axis, torch.device("cpu"), timeout_s, Meter())

    @contextmanager
    def _joining(self, name: str) -> Iterator[None]:
        """Inside, a group of this axis's ranks is made: a peer that does not come to it is an error that says so."""
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"rank {self.world_rank(self.rank)}: a peer did not join the group {name!r} within "
                f"{self.timeout.total_seconds():g} s, or has ended; look at its output first. The backend says: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def all_gather_bytes(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order; all ranks give equally many. Collective."""
        return self.start_all_gather_bytes(blob, label)() if blob else [b""] * self.size

    def start_all_gather_bytes(self, blob: bytes, label: Label) -> Callable[[], list[bytes]]:
        """Starts `all_gather_bytes`; calling the result waits for the bytes."""
        if self.simulated or self.size == 1:
            self.meter.count(label.purpose, "all-gather", len(blob) * (self.size - 1))
            return lambda: [blob] * self.size
        table = torch.zeros(self.size, len(blob), dtype=torch.uint8)
        table[self.rank] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        if self._hosts is None:
            table = table.to(self._device)
            pending = self.all_gather(table.view(-1), label)
        else:
            self._count(label, "all-gather", table)
            pending = self._all_gather_on_hosts(table, label)

        def rows() -> list[bytes]:
            with self.watched(label):
                pending.wait()
            flat = bytes(table.view(-1).tolist())
            return [flat[i * len(blob) : (i + 1) * len(blob)] for i in range(self.size)]

        return rows

    def _all_gather_on_hosts(self, table: Tensor, label: Label) -> Pending:
        """Starts to fill a table of a row per rank, in host memory. Beside NCCL it travels round a ring, so that gloo
        connects each rank to few others."""
        if self._hosts is self._wire:
            return self._wire.all_gather(table.view(-1), label)
        work = self.axis.group._allgather_base(table.view(-1), table[self.rank].clone())
        return Pending(self, label, [(None, work)])

    def all_reduce_max(self, blob: bytes, label: Label) -> bytes:
        """At every place the largest byte that any rank gave; all ranks give equally many. Collective."""
        return self.start_all_reduce_max(blob, label)()

    def start_all_reduce_max(self, blob: bytes, label: Label) -> Callable[[], bytes]:
        """Starts `all_reduce_max`; calling the result waits for the bytes. The message has as many bytes as `blob`,
        however many ranks there are."""
        if not blob:
            return lambda: b""
        by_nccl = self._hosts is None and not self.simulated
        sent = 2 * len(blob) * (self.size - 1) // self.size if by_nccl else len(blob) * max_rounds(self.size)
        self.meter.count(label.purpose, "all-reduce", sent)
        if self.simulated or self.size == 1:
            return lambda: blob
        with self.span("start", label):
            finish = self._max_on_device(blob, label) if self._hosts is None else self._max_on_hosts(blob, label)

        def largest() -> bytes:
            with self.watched(label):
                return finish()

        return largest

    def _max_on_hosts(self, blob: bytes, label: Label) -> Callable[[], bytes]:
        assert self._hosts is not None
        return Maximum(self, self._hosts, blob, label).finish

    def _max_on_device(self, blob: bytes, label: Label) -> Callable[[], bytes]:
        """Over NCCL, by its all-reduce, where the group has no gloo."""
        flat, options = bytes_tensor(blob).to(self._device), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        pending = Pending(self, label, [(None, self.axis.group.allreduce([flat], options))])

        def finish() -> bytes:
            pending.wait()
            return tensor_bytes(flat)

        return finish

    def broadcast_bytes(self, blob: bytes, label: Label) -> bytes:
        """Rank 0's bytes, of any length: two broadcasts, for set-up rather than for steps. Collective."""
        if self.size == 1 or self.simulated:
            return blob
        device = self._device if self._hosts is None else torch.device("cpu")
        length = torch.tensor([len(blob)], device=device)
        self.broadcast([length], label)
        flat = bytes_tensor(blob if self.rank == 0 else bytes(int(length))).to(device)
        self.broadcast([flat], label)
        return tensor_bytes(flat)

    def _count(self, label: Label, collective: str, flat: Tensor) -> None:
        self.meter.count(label.purpose, collective, flat.nbytes // self.size * (self.size - 1))


class Comms(NamedTuple):
    """A communicator for each axis in mesh.Axes, which says what they are."""

    shard: Comm
    replica: Comm
    everyone: Comm
    tp: Comm
    pp: Comm
    sequence: Comm
    owners: Comm
    holders: Comm
    world: Comm

    @classmethod
    def over(cls, axes: Axes, device: torch.device, timeout_s: float, meter: Meter) -> Comms:
        """Axes that are equal share one communicator."""
        made: dict[Axis, Comm] = {}
        for name, axis in zip(cls._fields, axes, strict=True):
            if axis not in made:
                made[axis] = Comm(axis, device, timeout_s, meter, one_link=BOTH if name == "replica" else None)
        return cls(*(made[axis] for axis in axes))

    def connect(self) -> None:
        """Makes the connections that messages of a step will need. Collective."""
        self.shard.connect()
        self.replica.connect()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_bytes(vectors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {peer: vector.view(torch.uint8) for peer, vector in vectors.items()}


def _unexpanded(tensor: Tensor) -> Tensor:
    """A view of each element once: dimensions made by expand() are narrowed to one."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 else tensor
    return tensor
