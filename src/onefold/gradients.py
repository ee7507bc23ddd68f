"""The gradients of one unit: a local sum, rounds that reduce it over ranks, and what they leave.

Each parameter's gradient is written (or added) to a flat buffer of the unit's layout: the local sum. A *round* reduces
that buffer over ranks and adds the result to what earlier rounds left. Where gradients are whole, the first round
happens in the unit's own buffer; where they are sharded, and for every later round before the optimizer steps, the
buffer is borrowed from the pool and returned when the round ends.

In fp32 gradients are scaled by 1/N as they enter. In 16 bits that would round them: there the sum over ranks runs in
fp32, is scaled, and is rounded once. Once gradients accumulate over micro-batches, sums are kept in fp32.

Where the host updates, a gradient that is complete is *parked*: my shard of it goes down to the host, and its buffer
here is free for the next unit. Should another round come before the update, what was parked comes up again first.
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
from onefold.precision import Dtypes
from onefold.spans import span
from onefold.tiers.host import Host, Mark
from onefold.views import FlatViews


class Round(NamedTuple):
    """A reduction on the way and the buffers it holds."""

    reduction: Reduction
    flat: Tensor
    scratch: Tensor


class Parcel:
    """A gradient on the host, or on its way there. Its buffer is free again when nobody holds it."""

    def __init__(self, host: Host, gradient: Tensor) -> None:
        self._pool = host.staging
        self.norm: Tensor | None = None  # found on the device, which is faster
        if gradient.is_cuda:
            self.norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        self._tensor = host.staging.take(gradient.numel(), gradient.dtype)
        self.landed = host.down(gradient, self._tensor)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def open(self) -> Tensor:
        self.landed.wait()
        return self._tensor

    def __del__(self) -> None:
        self._pool.give(self._tensor)


class Gradients:
    def __init__(
        self,
        views: FlatViews,
        scope: Scope,
        comm: Comm,
        replicas: Comm,
        pool: Pool,
        dtypes: Dtypes,
        host: Host | None = None,
    ) -> None:
        self._views, self._scope, self._comm, self._replicas, self._pool = views, scope, comm, replicas, pool
        self._host = host  # where it is parked
        self._layout = views.layout
        self._mine = views.layout.shard(comm.rank)
        mean = 1.0 / (comm.size * replicas.size)
        self._narrow, self._wire, self.dtype = dtypes.narrow, dtypes.wire, dtypes.grad
        self._scale, self._sum_scale = (1.0, mean) if self._narrow else (mean, 1.0)
        self._local_dtype = dtypes.wire
        self.reduced = False  # the gradient below is the sum of at least one round
        self._home: Tensor | None = None  # whole gradient, where gradients are whole
        self._shard: Tensor | None = None  # my shard of it, where they are sharded
        self._local: Tensor | None = None  # the local sum being built
        self.transient = host is not None  # it is parked, or used up inside backward: its buffer is the pool's
        self.parked: Parcel | None = None  # my shard of it, on the host
        self._leaving: list[Tensor] = []  # buffers here that a copy down still reads
        self._left = Mark()
        self._written: set[int] = set()
        self._rounds: deque[Round] = deque()

    @property
    def waiting(self) -> bool:
        """There is a local sum that no round has taken yet."""
        return self._local is not None

    @property
    def local_itemsize(self) -> int:
        """Bytes per element of what rounds borrow from the pool, at most."""
        return max(self._wire.itemsize, self._local_dtype.itemsize)

    def widen(self) -> None:
        """From now on gradients accumulate: keep sums in fp32."""
        empty = not (self.reduced or self.waiting or self._rounds)
        if empty and self._narrow and not (self.dtype is self._local_dtype is torch.float32):
            self.dtype = self._local_dtype = torch.float32
            self._home = self._shard = None

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
            view.copy_(grad) if self._narrow else torch.mul(grad, self._scale, out=view)
            self._written.add(index)

    def launch(self) -> None:
        """Start a round: what this rank did not write counts as zeros."""
        flat = self._open_local()
        for index in range(len(self._layout.slots)):
            if index not in self._written:
                self._views.view(flat, index).zero_()
        if flat.dtype is not self._wire:
            local, flat = flat, self._pool.take(self._layout.numel, self._wire)
            flat.copy_(local)
            self._let_go(local)
        scratch = self._pool.take(self._comm.scratch_numel(self._layout.shard_numel), self._wire)
        reduction = self._comm.reduce(flat, scratch, Label("reduce", self._layout.name))
        self._rounds.append(Round(reduction, flat, scratch))
        self._local = None
        self._written.clear()

    def finish(self) -> None:
        """End the oldest round: its sum is in the gradient, its buffers are back in the pool."""
        reduction, flat, scratch = self._rounds.popleft()
        own = self._own()
        if self.parked is not None:
            own.copy_(self.parked.open())
            self.parked = None
        plus = own if self.reduced else None
        wide = self._pool.take(self._layout.shard_numel, torch.float32) if self._narrow else None
        if self._replicas.size == 1:
            reduction.finish(own, plus, self._sum_scale, wide)
        else:
            part = flat[self._mine.start : self._mine.stop] if wide is None else wide
            reduction.finish(part, None, self._sum_scale, wide)
            self._sum_across_replicas(part)
            own.copy_(part) if plus is None else own.add_(part)
        if wide is not None:
            self._pool.give(wide)
        self._pool.give(scratch)
        self._let_go(flat)
        self.reduced = True

    def _sum_across_replicas(self, shard: Tensor) -> None:
        """All-reduce of one shard: each replica sums its part of it, then all gather the parts."""
        scratch = self._pool.take(self._replicas.scratch_numel(shard.numel() // self._replicas.size), shard.dtype)
        part = shard.view(self._replicas.size, -1)[self._replicas.rank]
        label = Label("reduce-replica", self._layout.name)
        self._replicas.reduce(shard, scratch, label).finish(part, None)
        self._replicas.gather(shard, label).wait()
        self._pool.give(scratch)

    def park(self) -> None:
        """The gradient is complete: send my shard of it to the host and let go of it here."""
        assert self._host is not None and self.parked is None
        with span("download", "gradient", self._layout.name):
            self.parked = Parcel(self._host, self._own())
        self._leaving += [held for held in (self._home, self._shard) if held is not None]
        self._left, self._home, self._shard = self.parked.landed, None, None

    def left(self) -> None:
        """Compute may use the buffers of what went down again, after the copy."""
        self._left.order()
        while self._leaving:
            self._pool.give(self._leaving.pop())

    def gather(self) -> Pending:
        """Make the reduced gradient whole, where the optimizer wants it whole."""
        return self._comm.gather(self._hold_whole(), Label("gather-gradient", self._layout.name))

    def part(self, span: Span) -> Tensor:
        """The reduced gradient of these elements of the unit, which this rank holds."""
        if self.parked is not None:
            return self.of_parcel(self.parked, span)
        if self._scope is Scope.WHOLE:
            return self._hold_whole()[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self._own()[mine.start : mine.stop]

    def of_parcel(self, parcel: Parcel, span: Span) -> Tensor:
        """These elements of what is on the host."""
        mine = span.clip(self._mine).shift(-self._mine.start)
        return parcel.open()[mine.start : mine.stop]

    def known_norms(self, norm_type: float) -> list[Tensor]:
        """The norm of my shard, if it was found on the device before it went down."""
        known = self.parked.norm if self.parked is not None and norm_type == 2.0 else None
        return [] if known is None else [known]

    def finite(self) -> bool:
        """Whether all of my shard is."""
        return bool(torch.isfinite((self.known_norms(2.0) or [self.mine()])[0]).all())

    def mine(self) -> Tensor:
        return self.part(self._mine)

    def whole_view(self, index: int) -> Tensor:
        """One parameter's gradient as a view, where gradients are whole."""
        return self._views.view(self._hold_whole(), index)

    def drop(self) -> None:
        """Forget all gradients."""
        assert not self._rounds
        if self._local is not None:
            self._let_go(self._local)
        self._local = None
        self._written.clear()
        self.reduced = False
        self.parked = None
        if self._host is not None:
            self.consume()

    def consume(self) -> None:
        """The gradient has been used: its buffers go back to the pool."""
        self.reduced, self.parked = False, None
        for held in (self._home, self._shard):
            if held is not None:
                self._pool.give(held)
        self._home = self._shard = None

    def zero(self) -> None:
        """Keep the gradient, as zeros."""
        had_any = self.reduced or self.waiting
        parked = self.parked is not None
        self.drop()
        for held in (self._own() if parked else None, self._home, self._shard):
            if held is not None:
                held.zero_()
        self.reduced = had_any

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as if no round had brought it."""
        slot = self._layout.slots[index].span
        if self.parked is not None:
            self.parked.norm = None
        self.part(slot if self._scope is Scope.WHOLE else slot.clip(self._mine)).zero_()
        if self._local is not None:
            self._views.view(self._local, index).zero_()

    def _open_local(self) -> Tensor:
        if self._local is None:
            free = self._scope is Scope.WHOLE and not self.reduced and not self._rounds
            if free and self._local_dtype is self.dtype:
                self._local = self._hold_whole()
            else:
                self._local = self._pool.take(self._layout.numel, self._local_dtype)
            self._views.zero_gaps(self._local)
        return self._local

    def _let_go(self, flat: Tensor) -> None:
        if flat is not self._home:
            self._pool.give(flat)

    def _own(self) -> Tensor:
        if self._scope is Scope.WHOLE:
            return self._hold_whole()[self._mine.start : self._mine.stop]
        if self._shard is None:
            self._shard = self._empty(self._layout.shard_numel)
        return self._shard

    def _hold_whole(self) -> Tensor:
        if self._home is None:
            self._home = self._empty(self._layout.numel)
        return self._home

    def _empty(self, numel: int) -> Tensor:
        if self.transient:
            return self._pool.take(numel, self.dtype)
        return torch.zeros(numel, dtype=self.dtype, device=self._views.device)

    def tensors(self) -> list[Tensor]:
        """What holds gradients now: the unit's own, and a local sum that waits in a borrowed buffer."""
        return [tensor for tensor in (self._home, self._shard, self._local) if tensor is not None]
