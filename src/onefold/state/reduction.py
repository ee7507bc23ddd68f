"""Reductions of one unit's flat gradients: over the ranks that share the unit, then across replicas of them.

In fp32 gradients are scaled by one over the number of ranks as they enter the local sum. In 16 bits that would round
them: there the sum over ranks runs in fp32, is scaled, and is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Reduction
from onefold.comm.meter import Label
from onefold.cost.layout import UnitLayout
from onefold.settings.precision import Dtypes


class ReductionInFlight(NamedTuple):
    """A reduction on the way and the buffers it holds."""

    reduction: Reduction
    flat: Tensor
    scratch: Tensor


class Reducer:
    """Starts and ends the reductions of one unit. Scratch memory is the pool's."""

    def __init__(self, layout: UnitLayout, comm: Comm, replicas: Comm, pool: Pool, dtypes: Dtypes) -> None:
        self._layout, self._comm, self._replicas, self._pool = layout, comm, replicas, pool
        self._mine = layout.shard(comm.rank)
        self._narrow, self.wire = dtypes.narrow, dtypes.wire
        mean = 1.0 / (comm.size * replicas.size)
        self.trivial = mean == 1.0  # a sum over one rank
        self.scale_before, self._scale_after = (1.0, mean) if self._narrow else (mean, 1.0)

    def start(self, flat: Tensor) -> ReductionInFlight:
        """Begin to sum a buffer, of the dtype that travels, over ranks."""
        scratch = self._pool.take(self._comm.scratch_numel(self._layout.shard_numel), self.wire)
        reduction = self._comm.reduce_scatter(flat, scratch, Label("reduce", self._layout.name))
        return ReductionInFlight(reduction, flat, scratch)

    def finish(self, oldest: ReductionInFlight, own: Tensor, *, add: bool) -> None:
        """Write my shard of the sum to `own`, or add it there. Then only `oldest.flat` is still held."""
        reduction, flat, scratch = oldest
        plus = own if add else None
        wide = self._pool.take(self._layout.shard_numel, torch.float32) if self._narrow else None
        if self._replicas.size == 1:
            reduction.finish(own, plus, self._scale_after, wide)
        else:
            part = flat[self._mine.start : self._mine.stop] if wide is None else wide
            reduction.finish(part, None, self._scale_after, wide)
            self._sum_across_replicas(part)
            own.copy_(part) if plus is None else own.add_(part)
        if wide is not None:
            self._pool.give(wide)
        self._pool.give(scratch)

    def _sum_across_replicas(self, shard: Tensor) -> None:
        """All-reduce of one shard: each replica sums its part of the shard, then all gather the parts."""
        scratch = self._pool.take(self._replicas.scratch_numel(shard.numel() // self._replicas.size), shard.dtype)
        part = shard.view(self._replicas.size, -1)[self._replicas.rank]
        label = Label("reduce-replica", self._layout.name)
        self._replicas.reduce_scatter(shard, scratch, label).finish(part, None)
        self._replicas.all_gather(shard, label).wait()
        self._pool.give(scratch)
