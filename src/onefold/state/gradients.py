"""The gradients of one unit: a local sum, rounds that reduce it over ranks, and what they leave.

Each parameter's gradient is written (or added) to a flat buffer of the unit's layout: the local sum. A *round* reduces
that buffer over ranks and adds the result to what earlier rounds left. Where gradients are whole, the first round
happens in the unit's own buffer; where they are sharded, and for every later round before the optimizer steps, the
buffer is borrowed from the pool and returned when the round ends.

In fp32 gradients are scaled by 1/N as they enter. In 16 bits that would round them: there the sum over ranks runs in
fp32, is scaled, and is rounded once. Once gradients accumulate over micro-batches, sums are kept in fp32.

One rank has nothing to reduce: in 16 bits, where one kernel updates whatever it is given, gradients are *loose*, as
autograd made them, taken as activations are freed, until somebody wants them in one vector.

Where the host updates, a gradient that is complete is *parked*: my shard of it goes down to the host, and its buffer
here is free for the next unit. Should another round come before the update, what was parked comes up again first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm, Pending, Reduction
from onefold.comm.meter import Label
from onefold.cost.layout import Span
from onefold.errors import ModelError
from onefold.offload.host import Host, StreamEvent
from onefold.offload.transfer import GradientTransfer
from onefold.settings.placement import Scope
from onefold.settings.precision import Dtypes
from onefold.state.views import FlatViews


class ReductionInFlight(NamedTuple):
    """A reduction on the way and the buffers it holds."""

    reduction: Reduction
    flat: Tensor
    scratch: Tensor


ALIGNED = 16  # bytes: kernels read whole vectors


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
        self._homes = pool if host is None else host.waiting
        self._layout = views.layout
        self._mine = views.layout.shard(comm.rank)
        mean = 1.0 / (comm.size * replicas.size)
        self._narrow, self._wire, self.dtype = dtypes.narrow, dtypes.wire, dtypes.grad
        self._scale, self._sum_scale = (1.0, mean) if self._narrow else (mean, 1.0)
        factor = torch.tensor(self._scale, dtype=_wide(dtypes.compute), device="cpu")  # torch casts a Python number
        self._factor = None if self._scale == 1.0 else factor  # for every product, which takes longer than the product
        self._local_dtype = dtypes.wire
        self.reduced = False  # the gradient below is the sum of at least one round
        self._home: Tensor | None = None  # whole gradient, where gradients are whole
        self._shard: Tensor | None = None  # my shard of it, where they are sharded
        self._local: Tensor | None = None  # the local sum being built
        self._slots: list[Tensor] = []  # the parameters' views of it
        self.transient = host is not None or not pool.keeps  # its buffer is the pool's, until it is parked or used
        self.offloaded: GradientTransfer | None = None  # my shard of it, on the host
        self._leaving: list[Tensor] = []  # buffers here that a copy down still reads
        self._left = StreamEvent()
        self._written: set[int] = set()
        self._in_flight: deque[ReductionInFlight | None] = deque()  # None: of loose gradients, which are their own sum
        self._may_stay_unflattened = self._narrow and mean == 1.0 and host is None
        self._unflattened: dict[int, Tensor] = {}  # by slot

    @property
    def waiting(self) -> bool:
        """There is a local sum that no round has taken yet."""
        return self._local is not None or bool(self._unflattened and not (self.reduced or self._in_flight))

    @property
    def local_itemsize(self) -> int:
        """Bytes per element of what rounds borrow from the pool, at most."""
        return max(self._wire.itemsize, self._local_dtype.itemsize)

    @property
    def held_bytes(self) -> int:
        """What a complete gradient takes here: mine alone, or all of it where gradients are whole."""
        numel = self._layout.numel if self._scope is Scope.REPLICATED else self._layout.shard_numel
        return numel * self.dtype.itemsize

    def widen(self) -> None:
        """From now on gradients accumulate: keep sums in fp32."""
        empty = not (self.reduced or self.waiting or self._in_flight)
        if empty and self._narrow and not (self.dtype is self._local_dtype is torch.float32):
            self.dtype = self._local_dtype = torch.float32
            self._home = self._shard = None

    def make_transient(self) -> None:
        """From now on gradients are used as soon as they are complete: buffers come from the pool."""
        self.transient = True

    def add(self, index: int, grad: Tensor) -> None:
        """Take one parameter's gradient into the local sum."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"{self._layout.slots[index].name} has a {grad.layout} gradient; flat units need dense ones: "
                f"build the module with sparse=False"
            )
        if self._may_stay_unflattened and self._stays_unflattened(index, grad):
            self._unflattened[index] = grad
            return
        if self._local is None:
            self._open_local()
        view = self._slots[index]
        if index in self._written:
            view.add_(grad, alpha=self._scale)
        else:
            view.copy_(grad) if self._factor is None else torch.mul(grad, self._factor, out=view)
            self._written.add(index)

    def _stays_unflattened(self, index: int, grad: Tensor) -> bool:
        if index in self._unflattened or self._local is not None or self.reduced or self._in_flight:
            return False
        alike = grad.dtype is self.dtype is self._local_dtype and grad.stride() == self._views.stride(index)
        return alike and grad.data_ptr() % ALIGNED == 0

    def launch(self) -> None:
        """Start a round: what this rank did not write counts as zeros."""
        if self._unflattened and self._local is None and not (self.reduced or self._in_flight):
            self._in_flight.append(None)
            return
        flat = self._open_local()
        if len(self._written) < len(self._slots):
            for index, view in enumerate(self._slots):
                if index not in self._written:
                    view.zero_()
        if flat.dtype is not self._wire:
            local, flat = flat, self._pool.take(self._layout.numel, self._wire)
            flat.copy_(local)
            self._let_go(local)
        scratch = self._pool.take(self._comm.scratch_numel(self._layout.shard_numel), self._wire)
        reduction = self._comm.reduce(flat, scratch, Label("reduce", self._layout.name))
        self._in_flight.append(ReductionInFlight(reduction, flat, scratch))
        self._close_local()

    def finish(self) -> None:
        """End the oldest round: its sum is in the gradient, its buffers are back in the pool."""
        oldest = self._in_flight.popleft()
        if oldest is None:
            self.reduced = True
            return
        reduction, flat, scratch = oldest
        own = self._own()
        if self.offloaded is not None:
            own.copy_(self.offloaded.wait())
            self.offloaded = None
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

    def offload(self) -> None:
        """The gradient is complete: send my shard of it to the host and let go of it here."""
        assert self._host is not None and self.offloaded is None
        own = self._own()
        self.offloaded = GradientTransfer(self._layout.name, self._host, own, self.norms(2.0) if own.is_cuda else None)
        self.offloaded.start_copy()
        self._leaving += self._hand_over()
        self._left = self.offloaded.copied

    def lend(self, left: Callable[[], None]) -> GradientTransfer:
        """The same when somebody brings it, who may be another thread. Until it has `left` its buffers are not free."""
        assert self._host is not None and self.offloaded is None
        own, buffers, pool = self._own(), self._hand_over(), self._homes

        def give() -> None:
            while buffers:
                pool.give(buffers.pop())
            left()

        return GradientTransfer(self._layout.name, self._host, own, on_released=give)

    def _hand_over(self) -> list[Tensor]:
        held = [held for held in (self._home, self._shard) if held is not None]
        self._home = self._shard = None
        return held

    def left(self) -> None:
        """Compute may use the buffers of what went down again, after the copy."""
        self._left.stream_wait()
        while self._leaving:
            self._homes.give(self._leaving.pop())

    def gather(self) -> Pending:
        """Make the reduced gradient whole, where the optimizer wants it whole."""
        label = Label("gather-gradient", self._layout.name)
        return Pending(self._comm, label, ()) if self._unflattened else self._comm.gather(self._hold_whole(), label)

    def part(self, span: Span) -> Tensor:
        """The reduced gradient of these elements of the unit, which this rank holds."""
        if self.offloaded is not None:
            return self.from_transfer(self.offloaded, span)
        if self._scope is Scope.REPLICATED:
            return self._hold_whole()[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self._own()[mine.start : mine.stop]

    def multiply(self, span: Span, factor: Tensor) -> None:
        """These elements, in place."""
        part = self.part(span)
        part.mul_(factor.to(part.device))
        if self.offloaded is not None:
            self.offloaded.norms = None  # they were of the gradient as it came

    def pieces(self, span: Span) -> list[tuple[Span, Tensor]]:
        """The same, in one vector or as autograd has left it: each with the elements it is of."""
        if not self._unflattened:
            return [(span, self.part(span))]
        inside = {i: slot.span for i, slot in enumerate(self._layout.slots) if slot.span.clip(span).numel}
        if any(i not in self._unflattened or part.clip(span) != part for i, part in inside.items()):
            return [(span, self.part(span))]
        return [(part, _in_one_line(self._unflattened[i])) for i, part in inside.items()]

    def from_transfer(self, transfer: GradientTransfer, span: Span) -> Tensor:
        """These elements of what is on the host."""
        mine = span.clip(self._mine).shift(-self._mine.start)
        return transfer.wait()[mine.start : mine.stop]

    def norms(self, norm_type: float, of: Callable[[str], bool] = lambda name: True) -> list[Tensor]:
        """The norm of what I have of each parameter, or of some by their names."""
        known = self.offloaded.norms if self.offloaded is not None and norm_type == 2.0 else None
        parts = {slot.name: part for slot in self._layout.slots if (part := slot.span.clip(self._mine)).numel}
        if known is not None:
            return [norm for name, norm in zip(parts, known, strict=True) if of(name)]
        if self._unflattened:
            names = {slot.name: index for index, slot in enumerate(self._layout.slots)}
            found = [self._unflattened[names[name]] for name in parts if names[name] in self._unflattened and of(name)]
        else:
            found = [self.part(part) for name, part in parts.items() if of(name)]
        return list(torch._foreach_norm(found, norm_type, _wide(self.dtype))) if found else []

    def mine(self) -> Tensor:
        return self.part(self._mine)

    def whole_view(self, index: int) -> Tensor:
        """One parameter's gradient as a view, where gradients are whole."""
        return self._unflattened[index] if index in self._unflattened else self._views.view(self._hold_whole(), index)

    def drop(self) -> None:
        """Forget all gradients."""
        assert not self._in_flight
        if self._local is not None:
            self._let_go(self._local)
        self._close_local()
        self._unflattened.clear()
        self.reduced = False
        self.offloaded = None
        if self.transient:
            self.consume()

    def consume(self) -> None:
        """The gradient has been used: its buffers go back to the pool."""
        self.reduced, self.offloaded = False, None
        self._unflattened.clear()
        for held in (self._home, self._shard):
            if held is not None:
                self._homes.give(held)
        self._home = self._shard = None

    def zero(self) -> None:
        """Keep the gradient, as zeros."""
        had_any = self.reduced or self.waiting
        for shown in self._unflattened.values():
            shown.zero_()
        self.drop()
        if had_any:
            (self._hold_whole() if self._scope is Scope.REPLICATED else self._own()).zero_()
        self.reduced = had_any

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as if no round had brought it."""
        slot = self._layout.slots[index].span
        if self.offloaded is not None:
            self.offloaded.norms = None
        if index in self._unflattened:
            self._unflattened[index].zero_()
        elif not self._unflattened:
            self.part(slot if self._scope is Scope.REPLICATED else slot.clip(self._mine)).zero_()
        if self._local is not None:
            self._slots[index].zero_()

    def _open_local(self) -> Tensor:
        if self._local is None:
            free = self._scope is Scope.REPLICATED and not self.reduced and not self._in_flight
            if free and self._local_dtype is self.dtype:
                self._local = self._hold_whole()
            else:
                self._local = self._pool.take(self._layout.numel, self._local_dtype)
            self._views.zero_padding(self._local)
            self._slots = self._views.all(self._local)
        return self._local

    def _close_local(self) -> None:
        self._local, self._slots = None, []
        self._written.clear()

    def _let_go(self, flat: Tensor) -> None:
        if flat is not self._home:
            self._pool.give(flat)

    def _own(self) -> Tensor:
        if self._scope is Scope.REPLICATED:
            return self._hold_whole()[self._mine.start : self._mine.stop]
        if self._shard is None:
            self._shard = self._empty(self._layout.shard_numel)
        return self._shard

    def _hold_whole(self) -> Tensor:
        if self._home is None:
            self._home = self._empty(self._layout.numel)
        if self._unflattened:
            loose, self._unflattened = self._unflattened, {}
            for index in range(len(self._layout.slots)):
                view = self._views.view(self._home, index)
                view.copy_(loose[index]) if index in loose else view.zero_()
            if not (self.reduced or self._in_flight):
                self._written.update(loose)
            self._views.zero_padding(self._home)
        return self._home

    def _empty(self, numel: int) -> Tensor:
        if self.transient:
            return self._homes.take(numel, self.dtype)
        return torch.zeros(numel, dtype=self.dtype, device=self._views.device)

    def tensors(self) -> list[Tensor]:
        """What holds gradients now: the unit's own, and a local sum that waits in a borrowed buffer."""
        held = [tensor for tensor in (self._home, self._shard, self._local) if tensor is not None]
        return [*held, *self._unflattened.values()]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _in_one_line(tensor: Tensor) -> Tensor:
    """The elements of a tensor that fills its memory, as they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))
