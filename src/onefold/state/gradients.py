"""The gradients of one unit, from autograd's tensors to what the optimizer reads.

1 Each parameter's gradient is added to the local sum (local_sum.py).
2 A reduction takes the local sum, sums it over ranks (reduction.py) and adds the result to what earlier reductions left
  (`GradientState` says where that is). Where gradients are replicated, the local sum of the first reduction is built in
  the unit's own buffer (gradient_buffer.py); where they are sharded, and for every later reduction before the optimizer
  steps, its buffer is borrowed from the pool and returned when the reduction ends.
3 The optimizer reads the reduced gradient. Where the host updates, a complete gradient is offloaded: my shard of it
  goes to the host, and its buffer on the device is free for the next unit. Should another reduction end before the
  update, the offloaded gradient is brought back first.

Once gradients accumulate over micro-batches, sums are kept in fp32; or in bf16, rounded stochastically, if users ask
for that (`Precision(accumulate="bf16")`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent, new_event
from onefold.cost.layout import Span
from onefold.errors import ModelError
from onefold.offload.host import Host
from onefold.offload.transfer import GradientTransfer
from onefold.settings.placement import Scope
from onefold.settings.precision import Dtypes
from onefold.state.gradient_buffer import GradientBuffer
from onefold.state.gradient_state import GRADIENT_STATES, GradientEvent, GradientState
from onefold.state.local_sum import FlatSum, Scale, UnflattenedSum
from onefold.state.reduction import Reducer, ReductionInFlight
from onefold.state.transitions import follow
from onefold.state.views import FlatViews


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
        self._views, self._layout, self._scope, self._comm, self._pool = views, views.layout, scope, comm, pool
        self._mine = views.layout.shard(comm.rank)
        self._used_at_once = False  # in backward: buffers are borrowed
        self._take_host(host, dtypes.grad)
        self._reducer = Reducer(views.layout, comm, replicas, pool, dtypes)
        self._narrow, self._local_dtype, self._unwidened = dtypes.narrow, dtypes.wire, dtypes.grad
        self._sums = dtypes.accumulate  # the dtype of sums over micro-batches, where 16 bits compute
        self._rounded = self._narrow and self._sums is not torch.float32
        self._reductions = 0  # that have ended since the gradient was empty
        self._stand_in: Tensor | None = None  # in a message of the unwidened dtype
        self._scale = Scale.of(self._reducer.scale_before, _wide(dtypes.compute))
        self._may_stay_unflattened = self._narrow and self._reducer.trivial and host is None
        # recorded after each gradient, where reductions run beside compute
        self._written = new_event(views.device) if self._reducer.on_stream else StreamEvent()
        self.state = GradientState.EMPTY
        self.offloaded: GradientTransfer | None = None  # my shard of the gradient, in the state OFFLOADED
        self._local: FlatSum | UnflattenedSum | None = None
        self._in_flight: deque[ReductionInFlight | UnflattenedSum] = deque()  # oldest first
        self._leaving: list[Tensor] = []  # buffers that a copy to the host still reads
        self._left = StreamEvent()

    def _move(self, event: GradientEvent) -> None:
        self.state = follow(GRADIENT_STATES, self.state, event, self._layout.name)

    @property
    def reduced(self) -> bool:
        """True once a reduction has ended, until gradients are used or dropped."""
        return self.state is not GradientState.EMPTY

    @property
    def waiting(self) -> bool:
        """True if there is a local sum that no reduction has taken yet."""
        return self._local is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reduced gradient."""
        return self._buffer.dtype

    @property
    def flat(self) -> bool:
        """Whether gradients are always in one buffer, and never in autograd's own tensors."""
        return not self._may_stay_unflattened

    @property
    def local_itemsize(self) -> int:
        """Bytes per element of what reductions borrow from the pool, at most."""
        return max(self._reducer.wire.itemsize, self._local_dtype.itemsize)

    @property
    def reducing_bytes(self) -> int:
        """Bytes that a reduction takes beside its local sum, at most."""
        return self._reducer.borrowed_bytes + self._buffer.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of a complete gradient on the device: of my shard, or of all where gradients are replicated."""
        return self._buffer.nbytes

    def widen(self) -> None:
        """Keeps sums in their own dtype from now on, fp32 or bf16, if this unit holds no gradients yet; else does
        nothing."""
        empty = self.state is GradientState.EMPTY and self._local is None and not self._in_flight
        if empty and self._narrow and not (self.dtype is self._local_dtype is self._sums):
            self._local_dtype = self._sums
            if not self._rounded:
                self._buffer.widen()
        self._may_stay_unflattened = self._may_stay_unflattened and not self._rounded  # a second gradient will follow

    @property
    def widens(self) -> bool:
        """Whether gradients are fp32 once they accumulate, and not before; the same on all ranks."""
        return self._narrow and not self._rounded and self._unwidened is not torch.float32

    def widen_reduced(self) -> None:
        """Keeps sums in fp32 from now on, and the reduced gradient too. No reduction is in flight."""
        self._stand_in, self._local_dtype = None, torch.float32
        self._buffer.widen_held()

    def make_transient(self, transient: bool = True) -> None:
        """From now on gradients are used as soon as they are complete: their buffers are the pool's; or no longer."""
        self._used_at_once = transient
        self._buffer.make_transient(transient or self._host is not None or not self._pool.keeps)

    def _take_host(self, host: Host | None, dtype: torch.dtype) -> None:
        """Complete gradients, of this dtype, go to this host; or stay on the device."""
        self._host = host
        self._homes = self._pool if host is None else host.waiting  # lends buffers to complete gradients
        transient = host is not None or self._used_at_once or not self._pool.keeps
        self._buffer = GradientBuffer(self._views, self._scope, self._mine, dtype, self._homes, transient=transient)

    def update_on(self, host: Host | None) -> None:
        """The unit is updated on this host from now on, or on the device (None). A gradient on the device stays there,
        one on the host until it is brought back. No reduction is in flight, and there is no local sum."""
        assert not self._in_flight and self._local is None
        self.left()
        held, before = self._buffer.own() if self.state is GradientState.REDUCED else None, self._buffer
        self._take_host(host, before.dtype)
        self._may_stay_unflattened = self._narrow and self._reducer.trivial and host is None and not self._rounds_sums
        if held is not None:
            self._buffer.own().copy_(held)
        self._reducer.wait_for_compute()  # before another reduction writes the old buffer
        before.clear()

    def bring_back(self) -> None:
        """Copies an offloaded gradient to the device, which updates the unit."""
        if self.offloaded is None:
            return
        if self._may_stay_unflattened:  # a buffer would stay, and later gradients not use it
            flat = self.offloaded.wait().to(self._views.device, copy=True)
            self._buffer.adopt(dict(enumerate(self._views.all(flat))))
        else:
            self._buffer.own().copy_(self.offloaded.wait())
        self.offloaded = None
        self._move(GradientEvent.RETURNED)

    @property
    def stays_on_device(self) -> bool:
        """Whether the memory of the gradient stays from step to step, if the device updates the unit."""
        return self._pool.keeps and not self._used_at_once and not (self._narrow and self._reducer.trivial)

    # -- the local sum, and its reduction ---------------------------------------------------------------------------

    def add(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient to the local sum."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"{self._layout.slots[index].name} has a {grad.layout} gradient; flat units need dense ones: "
                f"build the module with sparse=False"
            )
        if self._local is None:
            self._local = self._open_local()
        if not self._local.add(index, grad):
            self._local = self._flatten(self._local)
            self._local.add(index, grad)
        self._written.record()

    def _open_local(self) -> FlatSum | UnflattenedSum:
        first = self.state is GradientState.EMPTY and not self._in_flight
        if first and self._may_stay_unflattened and self.dtype is self._local_dtype:
            return UnflattenedSum(self._views, self.dtype)
        return self._open_flat()

    def _open_flat(self) -> FlatSum:
        first = self.state is GradientState.EMPTY and not self._in_flight
        if first and self._scope is Scope.REPLICATED and self._local_dtype is self.dtype:
            flat = self._buffer.whole()
        else:
            flat = self._pool.take(self._layout.numel, self._local_dtype)
        return FlatSum(flat, self._views, self._scale, rounded=self._rounds(flat))

    def _flatten(self, local: FlatSum | UnflattenedSum) -> FlatSum:
        """An unflattened sum, copied to the unit's own buffer, which nothing else uses yet."""
        assert isinstance(local, UnflattenedSum) and self.state is GradientState.EMPTY and not self._in_flight
        written = list(local.by_slot)
        self._buffer.adopt(local.by_slot)
        flat = self._buffer.whole()
        return FlatSum(flat, self._views, self._scale, written, rounded=self._rounds(flat))

    @property
    def _rounds_sums(self) -> bool:
        """Whether gradients accumulate in sums that are rounded stochastically."""
        return self._rounded and self._local_dtype is self._sums

    def _rounds(self, flat: Tensor) -> bool:
        """Whether sums in this buffer are rounded stochastically."""
        return self._rounded and flat.dtype is self._sums

    def launch(self) -> None:
        """Start a reduction of the local sum; parameters without a gradient on this rank count as zeros."""
        local, self._local = self._local, None
        if isinstance(local, UnflattenedSum):
            self._in_flight.append(local)
            return
        with self._reducer.beside_compute(self._written if local else StreamEvent()):
            flat = (local or self._open_flat()).complete()
            started = self._reducer.start(flat)
            if self._reducer.on_stream:
                self._sum(started)
            elif started.flat is not flat:
                self._let_go(flat)
        self._in_flight.append(started)

    def finish(self) -> None:
        """End the oldest reduction: its sum is in the gradient, its buffers are back in the pool."""
        oldest = self._in_flight.popleft()
        if isinstance(oldest, UnflattenedSum):
            self._buffer.adopt(oldest.by_slot)
        else:
            if not self._reducer.on_stream:
                self._sum(oldest)
            self._reducer.release(oldest)
            if self._reducer.on_stream or oldest.local is oldest.flat:
                self._let_go(oldest.local)
        self._move(GradientEvent.REDUCTION_ENDED)

    def _sum(self, started: ReductionInFlight) -> None:
        """Sums what ranks sent into the gradient. On a stream this is enqueued, behind earlier reductions."""
        own, add = self._buffer.own(), self.reduced or (self._reducer.on_stream and bool(self._in_flight))
        if self.offloaded is not None:
            own.copy_(self.offloaded.wait())
            self.offloaded = None
        number, self._reductions = self._reductions if add else 0, (self._reductions + 1 if add else 1)
        self._reducer.sum(started, own, rounded=number if add and self._rounded else None, add=add)

    def _let_go(self, flat: Tensor) -> None:
        if not self._buffer.holds(flat):
            self._pool.give(flat)

    # -- a complete gradient on its way to the host -----------------------------------------------------------------

    def offload(self) -> None:
        """The gradient is complete: send my shard of it to the host and let go of the device's buffer."""
        self._move(GradientEvent.SENT_TO_HOST)
        assert self._host is not None and self.offloaded is None
        own = self._buffer.own()
        self.offloaded = GradientTransfer(self._layout.name, self._host, own, self.norms(2.0) if own.is_cuda else None)
        self.offloaded.start_copy()
        self._leaving += self._buffer.hand_over()
        self._left = self.offloaded.copied

    def lend(self, left: Callable[[], None]) -> GradientTransfer:
        """The gradient is complete, and a host update brings it to the host, perhaps from another thread; `left` is
        called when it has, and only then is the device's buffer free."""
        self._move(GradientEvent.LENT)
        assert self._host is not None
        own, buffers, pool = self._buffer.own(), self._buffer.hand_over(), self._homes

        def give() -> None:
            while buffers:
                pool.give(buffers.pop())
            left()

        return GradientTransfer(self._layout.name, self._host, own, on_released=give)

    def left(self) -> None:
        """Give back the buffers of an offloaded gradient; whatever uses them next runs after the copy."""
        self._left.stream_wait()
        if self._leaving:
            self._reducer.wait_for_compute()
        while self._leaving:
            self._homes.give(self._leaving.pop())

    # -- the reduced gradient ---------------------------------------------------------------------------------------

    def gather(self) -> Pending:
        """Start to bring the whole reduced gradient to this rank, where the optimizer is replicated."""
        assert self.state is GradientState.REDUCED
        label = Label("gather-gradient", self._layout.name)
        if self._buffer.unflattened:
            return Pending(self._comm, label, ())
        return self._comm.all_gather(self._buffer.whole(), label)

    def gather_unwidened(self) -> Pending:
        """`gather` in the dtype that gradients have before they accumulate. Where they are fp32 here, what it sends is
        of no use, and it brings nothing."""
        if self.dtype is self._unwidened:
            return self.gather()
        self._stand_in = torch.zeros(self._layout.numel, dtype=self._unwidened, device=self._views.device)
        return self._comm.all_gather(self._stand_in, Label("gather-gradient", self._layout.name))

    def part(self, span: Span) -> Tensor:
        """The reduced gradient of these elements of the unit, which this rank holds."""
        return self._buffer.part(span) if self.offloaded is None else self.from_transfer(self.offloaded, span)

    def pieces(self, span: Span) -> list[tuple[Span, Tensor]]:
        """The reduced gradient of these elements, in one vector or as autograd has left it, each with its span."""
        return self._buffer.pieces(span) if self.offloaded is None else [(span, self.part(span))]

    def mine(self) -> Tensor:
        """The reduced gradient of my shard."""
        return self.part(self._mine)

    def replicated_view(self, index: int) -> Tensor:
        """One parameter's reduced gradient in its own shape, where gradients are replicated."""
        return self._buffer.view(index)

    def from_transfer(self, transfer: GradientTransfer, span: Span) -> Tensor:
        """The gradient of these elements, on the host."""
        mine = span.clip(self._mine).shift(-self._mine.start)
        return transfer.wait()[mine.start : mine.stop]

    def multiply(self, span: Span, factor: Tensor) -> None:
        """Scale the reduced gradient of these elements, in place."""
        part = self.part(span)
        part.mul_(factor.to(part.device))
        self.changes()

    def changes(self) -> None:
        """The reduced gradient is changed in place."""
        if self.offloaded is not None:
            self.offloaded.changes()

    def norms(self, norm_type: float, of: Callable[[str], bool] = lambda name: True) -> list[Tensor]:
        """The norm of each parameter's gradient within my shard, for parameters whose name `of` accepts."""
        known = self.offloaded.norms if self.offloaded is not None and norm_type == 2.0 else None
        parts = {slot.name: part for slot in self._layout.slots if (part := slot.span.clip(self._mine)).numel}
        if known is not None:
            return [norm for name, norm in zip(parts, known, strict=True) if of(name)]
        if by_slot := self._buffer.unflattened:
            names = {slot.name: index for index, slot in enumerate(self._layout.slots)}
            found = [by_slot[names[name]] for name in parts if names[name] in by_slot and of(name)]
        else:
            found = [self.part(part) for name, part in parts.items() if of(name)]
        return list(torch._foreach_norm(found, norm_type, _wide(self.dtype))) if found else []

    # -- gradients end ----------------------------------------------------------------------------------------------

    def consume(self) -> None:
        """Backward has updated the unit with the gradient: its memory is free."""
        self._move(GradientEvent.USED)
        self._reducer.wait_for_compute()
        self._buffer.clear()

    def drop(self) -> None:
        """Forget the local sum and the reduced gradient. No reduction is in flight."""
        assert not self._in_flight
        self._move(GradientEvent.DROPPED)
        if isinstance(self._local, FlatSum):
            self._let_go(self._local.flat)
        self._local = self.offloaded = None
        self._buffer.clear()

    def free(self) -> None:
        """Frees the buffer that stays from step to step. Gradients are dropped."""
        assert self.state is GradientState.EMPTY
        self._buffer.hand_over()

    def zero(self) -> None:
        """Forget the local sum and the reduced gradient; if there was either, keep zeros as the reduced gradient."""
        had_any = self.reduced or self.waiting
        for shown in self._buffer.unflattened.values():
            shown.zero_()
        self.drop()
        if had_any:
            self._buffer.zero()
            self._move(GradientEvent.ZEROED)

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as if no backward had brought it. No reduction is in flight."""
        assert not self._in_flight
        if self.offloaded is not None:
            self.offloaded.changes()
            self.from_transfer(self.offloaded, self._layout.slots[index].span).zero_()
        elif self.reduced:
            self._buffer.forget(index)
        if self._local is not None:
            self._local.forget(index)

    def tensors(self) -> list[Tensor]:
        """All device memory that holds gradients and is not a reduction's: the unit's own, and the local sum's."""
        sums = [one for one in (self._local, *self._in_flight) if isinstance(one, FlatSum | UnflattenedSum)]
        return self._buffer.tensors() + [tensor for one in sums for tensor in one.tensors()]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
