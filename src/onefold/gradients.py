"""The gradients of one unit: a local sum, rounds that reduce it over ranks, and what they leave.

Each parameter's gradient is scaled by 1/N and written (or added) to a flat buffer of the unit's layout: the local sum.
A *round* reduces that buffer over ranks and adds the result to what earlier rounds left. Where gradients are whole,
the first round happens in the unit's own buffer; where they are sharded, and for every later round before the
optimizer steps, the buffer is borrowed from the pool and returned when the round ends.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm import Comm, Label, Pending, Reduction
from onefold.errors import ModelError
from onefold.layout import Span
from onefold.memory import Pool
from onefold.placement import Scope
from onefold.views import FlatViews


class Round(NamedTuple):
    """A reduction on the way and the buffers it holds."""

    reduction: Reduction
    flat: Tensor
    scratch: Tensor


class Gradients:
    def __init__(self, views: FlatViews, scope: Scope, comm: Comm, replicas: Comm, pool: Pool) -> None:
        self._views, self._scope, self._comm, self._replicas, self._pool = views, scope, comm, replicas, pool
        self._layout = views.layout
        self._mine = views.layout.shard(comm.rank)
        self._scale = 1.0 / (comm.size * replicas.size)
        self.reduced = False  # the gradient below is the sum of at least one round
        self._home: Tensor | None = None  # whole gradient, where gradients are whole
        self._shard: Tensor | None = None  # my shard of it, where they are sharded
        self._local: Tensor | None = None  # the local sum being built
        self._written: set[int] = set()
        self._rounds: deque[Round] = deque()

    @property
    def waiting(self) -> bool:
        """There is a local sum that no round has taken yet."""
        return self._local is not None

    def add(self, index: int, grad: Tensor) -> None:
        """Take one parameter's gradient into the local sum."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"{self._layout.slots[index].name} has a {grad.layout} gradient; flat units need dense ones: "
                f"build the module with sparse=False"
            )
        view = self._views.view(self._open_local(), index)
        if index in self._written:
            view.add_(grad, alpha=self._scale)
        else:
            torch.mul(grad, self._scale, out=view)
            self._written.add(index)

    def launch(self) -> None:
        """Start a round: what this rank did not write counts as zeros."""
        flat = self._open_local()
        for index in range(len(self._layout.slots)):
            if index not in self._written:
                self._views.view(flat, index).zero_()
        sum_at, plus = self._own(), None
        if self._replicas.size > 1:
            sum_at = flat[self._mine.start : self._mine.stop]  # not yet the sum: replicas follow
        elif self.reduced or self._rounds:
            plus = sum_at
        shard = self._layout.shard_numel
        wanted = max(self._comm.scratch_numel(shard), self._replicas.scratch_numel(shard // self._replicas.size))
        scratch = self._pool.take(wanted, self._views.dtype)
        reduction = self._comm.reduce(flat, scratch, sum_at, plus, Label("reduce", self._layout.name))
        self._rounds.append(Round(reduction, flat, scratch))
        self._local = None
        self._written.clear()

    def finish(self) -> None:
        """End the oldest round: its sum is in the gradient, its buffers are back in the pool."""
        reduction, flat, scratch = self._rounds.popleft()
        reduction.wait()
        if self._replicas.size > 1:
            self._sum_across_replicas(flat[self._mine.start : self._mine.stop], scratch)
        self._pool.give(scratch)
        if flat is not self._home:
            self._pool.give(flat)
        self.reduced = True

    def _sum_across_replicas(self, shard: Tensor, scratch: Tensor) -> None:
        """All-reduce of one shard: each replica sums its part of it, then all gather the parts."""
        part = shard.view(self._replicas.size, -1)[self._replicas.rank]
        label = Label("reduce-replica", self._layout.name)
        self._replicas.reduce(shard, scratch, part, None, label).wait()
        self._replicas.gather(shard, label).wait()
        if self.reduced:
            self._own().add_(shard)
        elif shard.data_ptr() != self._own().data_ptr():
            self._own().copy_(shard)

    def gather(self) -> Pending:
        """Make the reduced gradient whole, where the optimizer wants it whole."""
        return self._comm.gather(self._hold_whole(), Label("gather-gradient", self._layout.name))

    def part(self, span: Span) -> Tensor:
        """The reduced gradient of these elements of the unit, which this rank holds."""
        if self._scope is Scope.WHOLE:
            return self._hold_whole()[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self._own()[mine.start : mine.stop]

    def mine(self) -> Tensor:
        return self.part(self._mine)

    def whole_view(self, index: int) -> Tensor:
        """One parameter's gradient as a view, where gradients are whole."""
        return self._views.view(self._hold_whole(), index)

    def drop(self) -> None:
        """Forget all gradients."""
        assert not self._rounds
        if self._local is not None and self._local is not self._home:
            self._pool.give(self._local)
        self._local = None
        self._written.clear()
        self.reduced = False

    def zero(self) -> None:
        """Keep the gradient, as zeros."""
        had_any = self.reduced or self.waiting
        self.drop()
        for held in (self._home, self._shard):
            if held is not None:
                held.zero_()
        self.reduced = had_any

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as if no round had brought it."""
        slot = self._layout.slots[index].span
        self.part(slot if self._scope is Scope.WHOLE else slot.clip(self._mine)).zero_()
        if self._local is not None:
            self._views.view(self._local, index).zero_()

    def _open_local(self) -> Tensor:
        if self._local is None:
            at_home = self._scope is Scope.WHOLE and not self.reduced and not self._rounds
            self._local = self._hold_whole() if at_home else self._pool.take(self._layout.numel, self._views.dtype)
            self._views.zero_gaps(self._local)
        return self._local

    def _own(self) -> Tensor:
        if self._scope is Scope.WHOLE:
            return self._hold_whole()[self._mine.start : self._mine.stop]
        if self._shard is None:
            self._shard = self._views.empty(self._layout.shard_numel).zero_()
        return self._shard

    def _hold_whole(self) -> Tensor:
        if self._home is None:
            self._home = self._views.empty(self._layout.numel).zero_()
        return self._home

    def tensors(self) -> list[Tensor]:
        """What holds gradients now: the unit's own, and a local sum that waits in a borrowed buffer."""
        return [tensor for tensor in (self._home, self._shard, self._local) if tensor is not None]
