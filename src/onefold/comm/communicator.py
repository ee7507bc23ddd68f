"""Communicators, the only callers of collectives: each call is metered by purpose, and named in errors.

`gather` is an all-gather in place: it fills a flat buffer of N equal slots, of which each rank has filled its own.
`reduce` is a reduce-scatter: the sum, in rank order, of this rank's slot over all ranks. `broadcast` copies rank 0's
bytes to all.

An all-gather has two halves: `post_shard` starts to send this rank's slot to its peers, `receive_shards` receives
theirs. On gloo a message travels once both sides have called, moved by gloo's own thread: after a rank has posted its
shards, its peers receive them when they like and in any order, without waiting for what that rank is doing. On NCCL
`receive_shards` is the whole all-gather, in the same order on all ranks.

Each backend has a wire (below). On gloo every rank sends each peer just the slot it needs and receives straight into
place: (N-1)/N of the buffer each way, half of what gloo's own reduce-scatter sends, and no copy of the own slot. The
sum runs here, in rank order, so every stage adds the same numbers in the same order. On NCCL the library's collectives
are called. One rank sends nothing: N - 1 = 0 messages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.inflight import PostedShards, keep
from onefold.comm.mesh import Axes, Axis, new_gloo_axis
from onefold.comm.meter import Label, Meter
from onefold.comm.spans import NOTHING, span
from onefold.comm.sums import sum_in_order, sum_wide
from onefold.errors import CommError, ConfigError

HINTS = {
    "gather-forward": 'If it ran fewer forwards or repeated other blocks, see schedule="negotiate", full_parameters. ',
    "gather-backward": "If ranks use a unit again after others, each in its own way, give it its own unit (units=). ",
}


class Pending:
    """Messages in flight. `wait` returns once they have completed, and may be called again."""

    is_posted_shard = False  # a shard for all peers, who receive it at any time

    def __init__(self, comm: Comm, label: Label, works: Sequence[tuple[int | None, dist.Work]]) -> None:
        self._comm, self._label, self._works = comm, label, works

    def wait(self) -> None:
        works, self._works = self._works, ()
        if works:
            with self._comm.span("wait", self._label):
                for peer, work in works:
                    self._comm._finish(work, self._label, peer)

    def __del__(self) -> None:
        """Keeps messages that are in flight when their model is freed, as after an error."""
        if self._works:
            keep(self._comm.posted if self.is_posted_shard else None, [work for _, work in self._works])


class Reduction(Pending):
    """A reduce-scatter in flight; `finish` gives the sum over ranks."""

    def __init__(self, pending: Pending, parts: Sequence[Tensor]) -> None:
        super().__init__(pending._comm, pending._label, pending._works)
        pending._works = ()  # this object waits for them
        self._parts = parts  # to be summed by this rank, in rank order; overwritten

    def finish(self, out: Tensor, plus: Tensor | None, scale: float = 1.0, wide: Tensor | None = None) -> None:
        """Waits; out = the sum [× scale] [+ plus]; with the fp32 buffer `wide`, computed there and rounded once."""
        self.wait()
        with self._comm.span("sum", self._label):
            if wide is None or (plus is None and scale == 1.0 and len(self._parts) == 1):
                sum_in_order(self._parts, out, plus)
            elif plus is None and len(self._parts) == 1 and out.dtype is self._parts[0].dtype:
                torch.mul(self._parts[0], scale, out=out)  # in fp32, and rounded once
            else:
                sum_wide(self._parts, out, plus, scale, wide)


class Comm:
    """Collectives over one axis of a mesh."""

    def __init__(self, axis: Axis, device: torch.device, timeout_s: float, meter: Meter) -> None:
        self.rank, self.size = axis.rank, axis.size
        self.peers = [peer for peer in range(axis.size) if peer != axis.rank]
        self.meter = meter
        self.posted = PostedShards()
        self.salt = 0  # distinguishes this model's messages from another's; the same on all ranks
        self.simulated = axis.plays is not None  # no peers: each is taken to send what this rank sends
        self._axis = axis
        self._timeout = timedelta(seconds=timeout_s)
        backend = axis.backend(device)
        if backend == "gloo" and device.type == "cpu":
            self._wire: PairwiseWire | CollectiveWire = PairwiseWire(self)
        elif backend == "nccl":
            self._wire = CollectiveWire(self)
        elif backend == "gloo":
            self._wire = StagedWire(self)
        else:
            raise ConfigError(f"{device.type} tensors over {backend}: use gloo for cpu, and nccl or gloo for cuda")
        self._small = self._host_wire()  # for a few bytes between hosts, which need no device

    def _host_wire(self) -> PairwiseWire | None:
        """A gloo wire for host memory, if this group has gloo beside the backend of the device."""
        if self.simulated or isinstance(self._wire, PairwiseWire):
            return None
        try:
            backend = self._axis.backend(torch.device("cpu"))
        except RuntimeError:  # a group that the user made, of NCCL alone
            return None
        return PairwiseWire(self) if backend == "gloo" else None

    def world_rank(self, rank: int) -> int:
        """The global rank of a rank of this axis."""
        return self._axis.world_ranks[rank]

    def scratch_numel(self, shard_numel: int) -> int:
        """Elements of scratch that `reduce` needs beside its buffer."""
        return self._wire.scratch_numel(shard_numel) if self.size > 1 else 0

    @property
    def any_order(self) -> bool:
        """Whether ranks may receive posted shards in different orders: on gloo, not in NCCL's collectives."""
        return isinstance(self._wire, PairwiseWire)

    @property
    def sums_here(self) -> bool:
        """Whether sums are computed by Onefold, in rank order and in fp32, and not by NCCL; also True for one rank."""
        return self.size == 1 or type(self._wire) is not CollectiveWire

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
        self.posted.received += 1
        with self.span("start", label):
            return self._wire.receive_shards(flat, label)

    def gather(self, flat: Tensor, label: Label) -> Pending:
        """Starts an all-gather in place: each rank has filled its own slot of the flat buffer."""
        self._count(label, "all-gather", flat)
        if self.size == 1:
            return Pending(self, label, ())
        with self.span("start", label):
            return self._wire.gather(flat, label)

    def reduce(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        """Starts a reduce-scatter: the sum of this rank's slot over all ranks. Overwrites `flat` and `scratch`."""
        self._count(label, "reduce-scatter", flat)
        if self.size == 1:
            return Reduction(Pending(self, label, ()), [flat])
        with self.span("start", label):
            return self._wire.reduce(flat, scratch, label)

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
            self._finish(self._axis.group.broadcast([flat], options), label, 0 if self.rank else None)
        if flat.data_ptr() != tensors[0].data_ptr():
            pieces = flat.split([tensor.nbytes for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                aligned = piece.clone() if piece.storage_offset() % tensor.itemsize else piece
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))

    def exchange(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order, of any lengths: two all-gathers, for set-up rather than for steps."""
        sizes = self.gather_bytes(len(blob).to_bytes(8, "big"), label)
        lengths = [int.from_bytes(size, "big") for size in sizes]
        rows = self.gather_bytes(blob.ljust(max(lengths), b"\0"), label)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def gather_to_first(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order, on rank 0; an empty list elsewhere. On gloo only."""
        assert isinstance(self._wire, PairwiseWire)
        sizes = [int.from_bytes(size, "big") for size in self.gather_bytes(len(blob).to_bytes(8, "big"), label)]
        boxes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        boxes[self.rank].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else boxes[self.rank])
        filled = {peer: box for peer, box in enumerate(boxes) if peer and box.numel()}
        mine = {0: filled[self.rank]} if self.rank in filled else {}
        self.meter.count(label.purpose, "gather", len(blob) if self.rank else 0)
        self._wire._swap(mine, {} if self.rank else filled, label).wait()
        return [] if self.rank else [ctypes.string_at(box.data_ptr(), box.numel()) for box in boxes]

    def new_gloo_group(self, name: str, timeout_s: float) -> Comm:
        """A communicator of the same ranks over a new gloo group, for use in another thread. Collective."""
        meter, self.meter = self.meter, Meter()  # these messages belong to no step
        try:
            self.gather_bytes(b"!", Label("meet", name))  # raises at once if a peer has ended
            axis = new_gloo_axis(self._axis, f"{name}/{self.salt}", self._timeout.total_seconds())
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                f"rank {self.world_rank(self.rank)}: a peer did not join the group {name!r} within "
                f"{self._timeout.total_seconds():g} s, or has ended; look at its output first. The backend says: "
                f"{str(error).splitlines()[0]}"
            ) from error
        finally:
            self.meter = meter
        return Comm(axis, torch.device("cpu"), timeout_s, Meter())

    def gather_bytes(self, blob: bytes, label: Label) -> list[bytes]:
        """Every rank's bytes, in rank order; all ranks give equally many. Collective."""
        return self.start_gather_bytes(blob, label)() if blob else [b""] * self.size

    def start_gather_bytes(self, blob: bytes, label: Label) -> Callable[[], list[bytes]]:
        """Starts `gather_bytes`; calling the result waits for the bytes."""
        if self.simulated or self.size == 1:
            self.meter.count(label.purpose, "all-gather", len(blob) * (self.size - 1))
            return lambda: [blob] * self.size
        table = torch.zeros(self.size, len(blob), dtype=torch.uint8)
        table[self.rank] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        if self._small is None:
            table = table.to(self._wire.small_device)
            pending = self.gather(table.view(-1), label)
        else:
            self._count(label, "all-gather", table)
            pending = self._small.gather(table.view(-1), label)

        def rows() -> list[bytes]:
            pending.wait()
            flat = bytes(table.view(-1).tolist())
            return [flat[i * len(blob) : (i + 1) * len(blob)] for i in range(self.size)]

        return rows

    def span(self, verb: str, label: Label) -> AbstractContextManager[Any]:
        """A span in the profiler's trace, if this axis has more than one rank."""
        return span(verb, *label) if self.size > 1 else NOTHING

    def _count(self, label: Label, collective: str, flat: Tensor) -> None:
        self.meter.count(label.purpose, collective, flat.nbytes // self.size * (self.size - 1))

    def _finish(self, work: dist.Work, label: Label, peer: int | None) -> None:
        try:
            work.wait(self._timeout)
        except Exception as error:
            who = "its peers" if peer is None else f"rank {self.world_rank(peer)}"
            raise CommError(
                f"rank {self.world_rank(self.rank)}: {label} got no answer from {who} within "
                f"{self._timeout.total_seconds():g} s, or {who} has ended; look at that rank's output first. "
                f"{HINTS.get(label.purpose, '')}"
                f"The backend says: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error


class Comms(NamedTuple):
    """A communicator for each axis in mesh.Axes, which says what they are."""

    shard: Comm
    replica: Comm
    everyone: Comm
    tp: Comm
    pp: Comm
    holders: Comm
    world: Comm

    @classmethod
    def over(cls, axes: Axes, device: torch.device, timeout_s: float, meter: Meter) -> Comms:
        """Axes that are equal share one communicator."""
        made: dict[Axis, Comm] = {}
        return cls(*(made.setdefault(axis, Comm(axis, device, timeout_s, meter)) for axis in axes))


class PairwiseWire:
    """CPU tensors over gloo: each slot is sent by its owner straight to where it is needed, point to point."""

    small_device = torch.device("cpu")

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def scratch_numel(self, shard_numel: int) -> int:
        return shard_numel * (self._comm.size - 1)

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return self._swap({peer: shard for peer in peers}, {}, label)

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._comm.size, -1).unbind()
        return self._swap({}, {peer: slots[peer] for peer in self._comm.peers}, label)

    def gather(self, flat: Tensor, label: Label) -> Pending:
        slots = flat.view(self._comm.size, -1).unbind()
        mine, peers = slots[self._comm.rank], self._comm.peers
        return self._swap({peer: mine for peer in peers}, {peer: slots[peer] for peer in peers}, label)

    def reduce(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        slots = flat.view(self._comm.size, -1).unbind()
        received = dict(zip(self._comm.peers, scratch.view(len(self._comm.peers), -1).unbind(), strict=True))
        parts = [received.get(rank, slots[rank]) for rank in range(self._comm.size)]
        return Reduction(self._swap({peer: slots[peer] for peer in self._comm.peers}, received, label), parts)

    def _swap(self, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        group, tag = self._comm._axis.group, _tag(label, self._comm.salt)
        calls: list[tuple[int, Any, Tensor]] = [(peer, group.recv, tensor) for peer, tensor in receives.items()]
        calls += [(peer, group.send, tensor) for peer, tensor in sends.items()]
        works: list[tuple[int | None, dist.Work]] = []
        gone: dict[int, RuntimeError] = {}
        for (
            peer,
            call,
            tensor,
        ) in calls:  # all, also after an error: peers that live must not wait for this rank because another has died
            try:
                works.append((peer, call([tensor], peer, tag)))
            except RuntimeError as error:
                gone[peer] = error
        if gone:
            who = ", ".join(f"rank {self._comm.world_rank(peer)}" for peer in gone)
            first = next(iter(gone.values()))
            raise CommError(
                f"rank {self._comm.world_rank(self._comm.rank)}: {label} could not start, {who} has ended; "
                f"look at its output first. The backend says: {str(first).splitlines()[0]}"
            ) from first
        return Pending(self._comm, label, works)


class CollectiveWire:
    """CUDA tensors over NCCL's own collectives, in an order that all ranks share."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def small_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def scratch_numel(self, shard_numel: int) -> int:
        return shard_numel

    def post_shard(self, shard: Tensor, label: Label, peers: Sequence[int]) -> Pending:
        return Pending(self._comm, label, ())

    def receive_shards(self, flat: Tensor, label: Label) -> Pending:
        return self.gather(flat, label)

    def gather(self, flat: Tensor, label: Label) -> Pending:
        numel = flat.numel() // self._comm.size
        mine = flat[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return Pending(self._comm, label, [(None, self._comm._axis.group._allgather_base(flat, mine))])

    def reduce(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        target = scratch[: flat.numel() // self._comm.size]
        work = self._comm._axis.group._reduce_scatter_base(target, flat, dist.ReduceScatterOptions())
        return Reduction(Pending(self._comm, label, [(None, work)]), (target,))


class StagedWire(CollectiveWire):
    """CUDA tensors over gloo, through host memory: for ranks that share a GPU, which NCCL refuses. Slow, and exact."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._host = PairwiseWire(comm)

    def scratch_numel(self, shard_numel: int) -> int:
        return self._host.scratch_numel(shard_numel)

    def gather(self, flat: Tensor, label: Label) -> Pending:
        staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        slots, target = staged.view(self._comm.size, -1), flat.view(self._comm.size, -1)
        slots[self._comm.rank].copy_(target[self._comm.rank])
        return Staged(self._host.gather(staged, label), staged, flat)

    def reduce(self, flat: Tensor, scratch: Tensor, label: Label) -> Reduction:
        staged = torch.empty(scratch.shape, dtype=flat.dtype, pin_memory=True)
        reduction = self._host.reduce(flat.cpu(), staged, label)
        mine = flat.view(self._comm.size, -1)[self._comm.rank]
        received = iter(scratch.view(self._comm.size - 1, -1))
        parts = [mine if rank == self._comm.rank else next(received) for rank in range(self._comm.size)]
        return StagedReduction(reduction, parts, staged, scratch)


class Staged(Pending):
    """An all-gather whose result is copied to the GPU once it has completed."""

    def __init__(self, pending: Pending, staged: Tensor, flat: Tensor) -> None:
        super().__init__(pending._comm, pending._label, pending._works)
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


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _unexpanded(tensor: Tensor) -> Tensor:
    """A view of each element once: dimensions made by expand() are narrowed to one."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 else tensor
    return tensor
