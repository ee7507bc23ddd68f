"""The device memory of one unit's reduced gradient: my shard of it, or all of it where gradients are replicated.

The buffer is made when it is first needed. It stays from step to step, or is *transient*: borrowed from a pool until
the gradient has been used or sent to the host. One rank in 16 bits may hold the gradient unflattened instead, in the
tensors that autograd made: they are copied into the buffer only if something needs one vector (another reduction, a
slice that cuts a parameter).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.cost.layout import Span
from onefold.settings.placement import Scope
from onefold.state.views import FlatViews


class GradientBuffer:
    def __init__(
        self, views: FlatViews, scope: Scope, mine: Span, dtype: torch.dtype, pool: Pool, *, transient: bool
    ) -> None:
        self._views, self._scope, self._mine, self._pool = views, scope, mine, pool
        self._layout = views.layout
        self.dtype, self.transient = dtype, transient
        self._whole: Tensor | None = None  # where gradients are replicated
        self._shard: Tensor | None = None  # where they are sharded
        self.unflattened: dict[int, Tensor] = {}  # by slot; instead of the buffer
        self._slots_inside: dict[Span, dict[int, Span] | None] = {}  # what `_inside` has found

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, made or not."""
        numel = self._layout.numel if self._scope is Scope.REPLICATED else self._layout.shard_numel
        return numel * self.dtype.itemsize

    def widen(self) -> None:
        """Hold fp32 from now on. Nothing is held that counts."""
        self.dtype = torch.float32
        self._whole = self._shard = None

    def widen_held(self) -> None:
        """Hold fp32 from now on, also what is held. Gradients are replicated, and flat."""
        assert not self.unflattened
        held, self.dtype = self._whole, torch.float32
        if held is not None and held.dtype is not torch.float32:
            self._whole = None
            self.whole().copy_(held)
            if self.transient:
                self._pool.give(held)

    def make_transient(self, transient: bool) -> None:
        """Nothing is held that counts."""
        self.transient, self._whole, self._shard = transient, None, None

    def adopt(self, by_slot: dict[int, Tensor]) -> None:
        """The gradient is what autograd made, for some slots or all; zeros for the others."""
        assert not self.unflattened
        self.unflattened = by_slot

    def whole(self) -> Tensor:
        """All of the buffer, where gradients are replicated, with whatever was unflattened copied into place."""
        assert self._scope is Scope.REPLICATED
        if self._whole is None:
            self._whole = self._empty(self._layout.numel)
        if self.unflattened:
            by_slot, self.unflattened = self.unflattened, {}
            for index in range(len(self._layout.slots)):
                view = self._views.view(self._whole, index)
                view.copy_(by_slot[index]) if index in by_slot else view.zero_()
            self._views.zero_padding(self._whole)
        return self._whole

    def own(self) -> Tensor:
        """My shard."""
        if self._scope is Scope.REPLICATED:
            return self.whole()[self._mine.start : self._mine.stop]
        if self._shard is None:
            self._shard = self._empty(self._layout.shard_numel)
        return self._shard

    def part(self, span: Span) -> Tensor:
        """These elements of the unit, which this rank holds."""
        if self._scope is Scope.REPLICATED:
            return self.whole()[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self.own()[mine.start : mine.stop]

    def pieces(self, span: Span) -> list[tuple[Span, Tensor]]:
        """These elements of the unit, as one vector or as one per unflattened parameter, each with its own span."""
        inside = self._inside(span) if self.unflattened else None
        if inside is None or any(i not in self.unflattened for i in inside):
            return [(span, self.part(span))]
        return [(part, _in_one_line(self.unflattened[i])) for i, part in inside.items()]

    def _inside(self, span: Span) -> dict[int, Span] | None:
        """The slots of these elements; None if they cut one."""
        if span not in self._slots_inside:
            found = {i: slot.span for i, slot in enumerate(self._layout.slots) if slot.span.clip(span).numel}
            cut = any(part.clip(span) != part for part in found.values())
            self._slots_inside[span] = None if cut else found
        return self._slots_inside[span]

    def view(self, index: int) -> Tensor:
        """One parameter's gradient in its own shape, where gradients are replicated."""
        return self.unflattened[index] if index in self.unflattened else self._views.view(self.whole(), index)

    def forget(self, index: int) -> None:
        """Zeros for one parameter."""
        if index in self.unflattened:
            self.unflattened[index].zero_()
        elif not self.unflattened:
            span = self._layout.slots[index].span
            self.part(span if self._scope is Scope.REPLICATED else span.clip(self._mine)).zero_()

    def zero(self) -> None:
        """Zeros for all parameters, in the buffer."""
        (self.whole() if self._scope is Scope.REPLICATED else self.own()).zero_()

    def hand_over(self) -> list[Tensor]:
        """The buffer, which is the caller's from now on: to be given back to the pool, if transient."""
        held = [held for held in (self._whole, self._shard) if held is not None]
        self._whole = self._shard = None
        return held

    def clear(self) -> None:
        """Nothing that is held counts any more; transient memory goes back to the pool."""
        self.unflattened = {}
        if self.transient:
            for held in self.hand_over():
                self._pool.give(held)

    def holds(self, flat: Tensor) -> bool:
        return flat is self._whole

    def tensors(self) -> list[Tensor]:
        """All memory that is held."""
        return [held for held in (self._whole, self._shard) if held is not None] + list(self.unflattened.values())

    def _empty(self, numel: int) -> Tensor:
        if self.transient:
            return self._pool.take(numel, self.dtype)
        return torch.zeros(numel, dtype=self.dtype, device=self._views.device)


def _in_one_line(tensor: Tensor) -> Tensor:
    """The elements of a tensor that fills its memory, as they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))
