"""The local sum of one unit: gradients of this rank that no reduction has taken yet.

A local sum is flat, in one buffer of the unit's layout, or unflattened, in the tensors that autograd made. One rank
that trains in 16 bits has nothing to reduce, and its update kernels read any number of tensors: there gradients stay
unflattened until something needs one vector, or until a second gradient of a parameter has to be added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.state.random_rounding import add_rounded, keys_of
from onefold.state.views import FlatViews

LOCAL = 1  # seed of random rounding, of local sums
ALIGNED = 16  # bytes: kernels read whole vectors


class Scale(NamedTuple):
    """What gradients are multiplied by as they enter a flat sum."""

    alpha: float
    factor: Tensor | None  # the same number as a tensor, or None for 1: torch casts a Python number for every product

    @staticmethod
    def of(alpha: float, dtype: torch.dtype) -> Scale:
        return Scale(alpha, None if alpha == 1.0 else torch.tensor(alpha, dtype=dtype, device="cpu"))


class FlatSum:
    """A local sum in a flat buffer. Slots in `written` hold gradients already; all others are overwritten. With
    `rounded`, sums in bf16 are rounded stochastically."""

    def __init__(
        self, flat: Tensor, views: FlatViews, scale: Scale, written: Iterable[int] = (), *, rounded: bool = False
    ) -> None:
        views.zero_padding(flat)
        self.flat, self._slots, self._views = flat, views.all(flat), views
        self._written = dict.fromkeys(written, 1)  # how many gradients a slot holds
        self._alpha, self._factor = scale
        self._rounded = rounded

    def add(self, index: int, grad: Tensor) -> bool:
        """Add one parameter's gradient. True: a flat sum takes every dense gradient."""
        view, count = self._slots[index], self._written.get(index, 0)
        self._written[index] = count + 1
        if not count:
            view.copy_(grad) if self._factor is None else torch.mul(grad, self._factor, out=view)
        elif self._rounded:
            slot = self._views.layout.slots[index]
            total = self.flat[slot.start : slot.start + slot.span.numel]
            add_rounded(total, self._views.in_memory_order(grad, index), keys_of(LOCAL, slot.name, count), 0)
        else:
            view.add_(grad, alpha=self._alpha)
        return True

    def complete(self) -> Tensor:
        """The buffer, with zeros for parameters that got no gradient."""
        if len(self._written) < len(self._slots):
            for index, view in enumerate(self._slots):
                if index not in self._written:
                    view.zero_()
        return self.flat

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient."""
        self._slots[index].zero_()

    def tensors(self) -> list[Tensor]:
        return [self.flat]


class UnflattenedSum:
    """A local sum in autograd's own tensors, by slot. One rank's local sum is also the sum over ranks."""

    def __init__(self, views: FlatViews, dtype: torch.dtype) -> None:
        self._views, self._dtype = views, dtype
        self.by_slot: dict[int, Tensor] = {}

    def add(self, index: int, grad: Tensor) -> bool:
        """Take one parameter's gradient as it is; False if it has to be copied or added, which needs a flat sum."""
        alike = grad.dtype is self._dtype and grad.stride() == self._views.stride(index)
        if index in self.by_slot or not alike or grad.data_ptr() % ALIGNED:
            return False
        self.by_slot[index] = grad
        return True

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient."""
        if index in self.by_slot:
            self.by_slot[index].zero_()

    def tensors(self) -> list[Tensor]:
        return list(self.by_slot.values())
