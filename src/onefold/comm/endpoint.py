"""One rank's end of an axis of ranks, and the messages that are in flight there.

A message that fails, or gets no answer in time, raises a CommError that names the purpose, the unit and the peer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.hang_record import record_hang
from onefold.comm.inflight import PostedShards, keep
from onefold.comm.last_words import first_words
from onefold.comm.mesh import Axis, link_name
from onefold.comm.meter import Label
from onefold.comm.spans import NOTHING, span
from onefold.comm.streams import StreamEvent
from onefold.comm.sums import sum_in_order, sum_wide
from onefold.comm.waits import Waits
from onefold.comm.watching import check_watcher, current_watcher
from onefold.errors import CommError

HINTS = {
    "gather-forward": (
        "At stage 3 all ranks run equally many micro-batches; if it ran fewer forwards or repeated other blocks, see "
        'schedule="negotiate", full_parameters. '
    ),
    "sequence": "If it runs other attention calls, or has stretches of another length: those of one batch are equal. ",
    "used-flags": "If it runs more micro-batches in this step: at stage 3 all ranks must run equally many. ",
    "gather-backward": "If ranks use a unit again after others, each in its own way, give it its own unit (units=). ",
}
BROKE = 0.9  # of a time limit: a message that fails earlier has lost its connection


class Endpoint:
    """This rank on one axis of a mesh: its peers, their process group, and the time limit of messages."""

    def __init__(self, axis: Axis, timeout_s: float) -> None:
        self.rank, self.size = axis.rank, axis.size
        self.peers = [peer for peer in range(axis.size) if peer != axis.rank]
        self.posted = PostedShards()
        self.salt = 0  # distinguishes this model's messages from another's; the same on all ranks
        self.axis, self.timeout = axis, timedelta(seconds=timeout_s)
        self.waits: Waits | None = None  # where somebody wants to know how long this rank waits

    def world_rank(self, rank: int) -> int:
        """The global rank of a rank of this axis."""
        return self.axis.world_ranks[rank]

    def span(self, verb: str, label: Label) -> AbstractContextManager[Any]:
        """A span in the profiler's trace, if this axis has more than one rank."""
        return span(verb, *label) if self.size > 1 else NOTHING

    def finish(self, work: dist.Work, label: Label, peer: int | None) -> None:
        """Waits on the host for one message; `peer` is the rank at its other end, None if all ranks take part."""
        began_s = time.monotonic()
        try:
            work.wait(self.timeout)
        except Exception as error:
            if (watcher := current_watcher()) is not None:
                broke = time.monotonic() - began_s < BROKE * self.timeout.total_seconds()
                watcher.explain(self.world_rank(peer) if broke and peer is not None else None)
            raise self._unanswered(label, peer, error) from error  # no local name: it would keep this frame alive
        if self.waits is not None:
            self.waits.host_s += time.monotonic() - began_s

    def _unanswered(self, label: Label, peer: int | None, error: Exception) -> CommError:
        """What is raised for a message that failed; where hangs are recorded, peers hear of it."""
        who, words = "its peers" if peer is None else f"rank {self.world_rank(peer)}", first_words()
        found = f"{words}. Here " if words else ""
        found += (
            f"{label} got no answer from {who} within {self.timeout.total_seconds():g} s, or {who} has ended; look "
            f"at that rank's output first. {HINTS.get(label.purpose, '')}"
            f"The backend says: {(str(error) or type(error).__name__).splitlines()[0]}"
        )
        rank = self.world_rank(self.rank)
        record_hang(rank, dist.get_world_size(), found)
        told = CommError(f"rank {rank}: {found}")
        if (watcher := current_watcher()) is not None:
            watcher.announce(told)
        return told

    @contextmanager
    def watched(self, label: Label) -> Iterator[None]:
        """Inside, this rank waits on the host for a message that all ranks of the axis come to in one order."""
        waits, watcher = True, current_watcher()
        if watcher is not None and self.size > 1:
            limit_s = self.timeout.total_seconds()
            watcher.issued(link_name("control", self.axis), self.axis.world_ranks, label, lambda: not waits, limit_s)
        try:
            yield
        finally:
            waits = False


class Pending:
    """Messages in flight. `wait` returns once they have completed, and may be called again."""

    is_posted_shard = False  # a shard for all peers, who receive it at any time

    def __init__(self, endpoint: Endpoint, label: Label, works: Sequence[tuple[int | None, dist.Work]]) -> None:
        self._endpoint, self._label, self._works = endpoint, label, works

    def wait(self) -> None:
        works, self._works = self._works, ()
        if works:
            with self._endpoint.span("wait", self._label):
                for peer, work in works:
                    self._endpoint.finish(work, self._label, peer)

    def __del__(self) -> None:
        """Keeps messages that are in flight when their model is freed, as after an error."""
        if self._works:
            keep(self._endpoint.posted if self.is_posted_shard else None, [work for _, work in self._works])


class StreamPending(Pending):
    """A message in flight on a CUDA stream. `wait` makes the current stream wait for it, and never the host.

    `reads` are kept until then: memory that is freed earlier may be given to a kernel of the current stream that
    writes it while the message is still sent from it.
    """

    def __init__(self, endpoint: Endpoint, label: Label, event: StreamEvent, reads: Sequence[Tensor] = ()) -> None:
        super().__init__(endpoint, label, ())
        self._event: StreamEvent | None = event
        self._reads = reads

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            check_watcher()
            waits = self._endpoint.waits
            with waits.stream() if waits is not None and waits.on_stream else NOTHING:
                event.stream_wait()
        self._reads = ()

    def __del__(self) -> None:
        """Orders the current stream after the message, whose buffers may be freed from here on."""
        if self._event is not None:
            self._event.stream_wait()


class Reduction:
    """A reduce-scatter in flight; `finish` gives the sum over ranks. The parts, in rank order, are overwritten."""

    def __init__(self, pending: Pending, parts: Sequence[Tensor]) -> None:
        self.pending, self.parts = pending, parts
        self._endpoint, self._label = pending._endpoint, pending._label

    def wait(self) -> None:
        """Waits until all parts are here."""
        self.pending.wait()

    def finish(self, out: Tensor, plus: Tensor | None, scale: float = 1.0, wide: Tensor | None = None) -> None:
        """Waits; out = the sum [× scale] [+ plus]; with the fp32 buffer `wide`, computed there and rounded once."""
        self.wait()
        with self._endpoint.span("sum", self._label):
            if wide is None or (plus is None and scale == 1.0 and len(self.parts) == 1):
                sum_in_order(self.parts, out, plus)
            elif plus is None and len(self.parts) == 1 and out.dtype is self.parts[0].dtype:
                torch.mul(self.parts[0], scale, out=out)  # in fp32, and rounded once
            else:
                sum_wide(self.parts, out, plus, scale, wide)
