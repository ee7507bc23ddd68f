"""Reductions of one unit's flat gradients: over the ranks that share the unit, then across replicas of them.

In fp32 gradients are scaled by one over the number of ranks as they enter the local sum. In 16 bits that would round
them: there the sum over ranks runs in fp32, is scaled, and is rounded once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Reduction
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent, event_now
from onefold.cost.layout import UnitLayout
from onefold.settings.precision import Dtypes
from onefold.state.random_rounding import add_rounded, keys_of

REDUCED = 2  # seed of random rounding, of sums over ranks


class ReductionInFlight:
    """A reduction on the way: the flat buffer that was to be summed, and buffers that it borrows from the pool."""

    def __init__(self, reduction: Reduction, local: Tensor, flat: Tensor, borrowed: list[Tensor]) -> None:
        self.reduction, self.local, self.flat, self.borrowed = reduction, local, flat, borrowed
        self.summed = StreamEvent()  # passes once the sum is where it belongs, where it runs beside compute


class Reducer:
    """Starts and ends the reductions of one unit. Scratch memory is the pool's.

    Where messages run on CUDA streams, a reduction is enqueued there at once, beside compute: copies before the
    message, the message, the sum over ranks, the sum across replicas. It waits for the last gradient of its own unit
    and not for what compute does since then. Otherwise a rank that skips blocks could not send its zeros before blocks
    that peers, who wait for these zeros, gather for it. On gloo the sums run when a reduction is finished.
    """

    def __init__(self, layout: UnitLayout, comm: Comm, replicas: Comm, pool: Pool, dtypes: Dtypes) -> None:
        self._layout, self._comm, self._replicas, self._pool = layout, comm, replicas, pool
        self._mine = layout.shard(comm.rank)
        self._narrow, self.wire = dtypes.narrow, dtypes.wire
        self.on_stream = comm.on_stream or replicas.on_stream
        mean = 1.0 / (comm.size * replicas.size)
        self.trivial = mean == 1.0  # a sum over one rank
        self.scale_before, self._scale_after = (1.0, mean) if self._narrow else (mean, 1.0)

    @cached_property
    def borrowed_bytes(self) -> int:
        """The most bytes that one reduction borrows."""
        numel = self._layout.numel + self._comm.scratch_numel(self._layout.shard_numel, self.wire)
        return numel * self.wire.itemsize + self._layout.shard_numel * torch.float32.itemsize

    def beside_compute(self, after: StreamEvent) -> AbstractContextManager[None]:
        """Inside, what is enqueued and allocated belongs to the stream of reductions, if there is one."""
        return (self._comm if self._comm.size > 1 else self._replicas).reduce_stream(after)

    def start(self, local: Tensor) -> ReductionInFlight:
        """Begins to sum a flat buffer over ranks. Where it has not the dtype that travels, a copy of it does."""
        borrowed: list[Tensor] = []
        flat = local
        if local.dtype is not self.wire:
            flat = self._borrow(borrowed, self._layout.numel, self.wire)
            flat.copy_(local)
        numel = self._comm.scratch_numel(self._layout.shard_numel, self.wire)
        scratch = self._borrow(borrowed, numel, self.wire)
        reduction = self._comm.reduce_scatter(flat, scratch, Label("reduce", self._layout.name))
        return ReductionInFlight(reduction, local, flat, borrowed)

    def sum(self, started: ReductionInFlight, own: Tensor, *, add: bool, rounded: int | None = None) -> None:
        """Writes my shard of the sum to `own`, or adds it there: rounded to the nearest, or stochastically if it is the
        `rounded`-th sum that is added."""
        plus, reduction, borrowed = own if add else None, started.reduction, started.borrowed
        wide = self._borrow(borrowed, self._layout.shard_numel, torch.float32) if self._narrow else None
        if self._replicas.size == 1 and rounded is not None:
            assert wide is not None
            reduction.finish(wide, None, self._scale_after, wide)
            self._add_rounded(own, wide, rounded)
            started.summed = self._event()
            return
        if self._replicas.size == 1:
            reduction.finish(own, plus, self._scale_after, wide)
            started.summed = self._event()
            return
        part = started.flat[self._mine.start : self._mine.stop] if wide is None else wide
        numel = self._replicas.scratch_numel(part.numel() // self._replicas.size, part.dtype)
        scratch = self._borrow(borrowed, numel, part.dtype)
        reduction.finish(part, None, self._scale_after, wide)
        with self._replicas.reduce_stream(self._event()):
            self._sum_across_replicas(part, scratch)
            if rounded is not None:
                self._add_rounded(own, part, rounded)
            else:
                own.copy_(part) if plus is None else own.add_(part)
            started.summed = self._event()

    def _add_rounded(self, own: Tensor, part: Tensor, number: int) -> None:
        """Adds an fp32 vector to my shard in bf16, parameter by parameter, and rounds stochastically."""
        for slot in self._layout.slots:
            mine = slot.span.clip(self._mine)
            if mine.numel:
                at = mine.shift(-self._mine.start)
                keys = keys_of(REDUCED, slot.name, number)
                add_rounded(own[at.start : at.stop], part[at.start : at.stop], keys, mine.start - slot.start)

    def release(self, started: ReductionInFlight) -> None:
        """Makes the compute stream wait for the sum, and gives back what was borrowed."""
        started.summed.stream_wait()
        if self._replicas.size > 1:
            with self.beside_compute(started.summed):
                pass  # what was borrowed may be used again there, and the other stream has done with it
        while started.borrowed:
            self._pool.give(started.borrowed.pop())

    def wait_for_compute(self) -> None:
        """Later reductions wait for compute, which may still read memory that they are about to use."""
        self._comm.reductions_wait()
        self._replicas.reductions_wait()

    def _borrow(self, borrowed: list[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        borrowed.append(self._pool.take(numel, dtype))
        return borrowed[-1]

    def _event(self) -> StreamEvent:
        """An event recorded in the current stream now, where sums run beside compute."""
        return event_now(self._pool.device) if self.on_stream else StreamEvent()

    def _sum_across_replicas(self, shard: Tensor, scratch: Tensor) -> None:
        """All-reduce of one shard: each replica sums its part of the shard, then all gather the parts."""
        part = shard.view(self._replicas.size, -1)[self._replicas.rank]
        label = Label("reduce-replica", self._layout.name)
        self._replicas.reduce_scatter(shard, scratch, label).finish(part, None)
        self._replicas.all_gather(shard, label).wait()
