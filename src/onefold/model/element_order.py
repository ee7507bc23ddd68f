"""The order in which the elements of a tensor are numbered: memory order, part by part if it is split over "tp".

Ranks of "tp" hold parts of a tensor, split along one dim. Checkpoints, and updates that need whole tensors, number the
elements of the first part first, then those of the second; nothing else in a checkpoint depends on the ranks that wrote
it. If the dim has the largest stride, the parts one after the other are the full tensor in memory order, and the split
changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.model.dtensor_shards import TensorShard


class Order(NamedTuple):
    """The element order of a tensor. Rows are counted along `dim`; parts are runs of rows."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of the full dense tensor
    dim: int = 0
    bounds: tuple[int, ...] = ()  # rows where parts begin, and the number of rows; empty if it is not split

    @property
    def row_numel(self) -> int:
        return math.prod(size for dim, size in enumerate(self.shape) if dim != self.dim)

    def same(self, other: Order) -> bool:
        """Whether every element has the same number in both orders."""
        alike = all(a == b for size, a, b in zip(self.shape, self.stride, other.stride, strict=True) if size > 1)
        cuts = [one[2:] if one.interleaved else (0, ()) for one in (self, other)]
        return self.shape == other.shape and alike and cuts[0] == cuts[1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def interleaved(self) -> bool:
        """Whether the split changes the order: two parts have rows, and another dim has a larger stride."""
        filled = sum(start < stop for start, stop in pairwise(self.bounds))
        outer = any(size > 1 and step > self.stride[self.dim] for size, step in zip(self.shape, self.stride))
        return filled > 1 and outer and 0 not in self.shape

    def parts(self) -> list[Span]:
        """The rows of each part."""
        return [Span(*rows) for rows in pairwise(self.bounds)] or [Span(0, self.shape[self.dim])]

    def elements(self, rows: Span) -> Span:
        """The elements of these rows, which are complete parts."""
        return Span(rows.start * self.row_numel, rows.stop * self.row_numel)

    def around_elements(self, span: Span) -> Span:
        """The rows of the parts that contain these elements."""
        return _hull(rows for rows in self.parts() if self.elements(rows).clip(span).numel)

    def around_rows(self, wanted: Span) -> Span:
        """The rows of the parts that contain these rows."""
        return _hull(rows for rows in self.parts() if rows.clip(wanted).numel)

    def tensor(self, flat: Tensor, rows: Span) -> Tensor:
        """Complete parts as one tensor, from a vector of their elements."""
        pieces = [piece for _, piece in self._pieces(flat, rows)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def flat(self, tensor: Tensor, rows: Span) -> Tensor:
        """The elements of complete parts as a vector, from these rows of the tensor."""
        out = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        for part, piece in self._pieces(out, rows):
            piece.copy_(tensor.narrow(self.dim, part.start - rows.start, part.numel))
        return out

    def to_memory_order(self, flat: Tensor, out: Tensor) -> None:
        """Copies all elements from a vector in this order to a vector in memory order."""
        if not self.interleaved:
            out.copy_(flat)
            return
        for part, piece in self._pieces(flat, Span(0, self.shape[self.dim])):
            self.full(out).narrow(self.dim, part.start, part.numel).copy_(piece)

    def from_memory_order(self, vector: Tensor, out: Tensor) -> None:
        """Copies all elements from a vector in memory order to a vector in this order."""
        if not self.interleaved:
            out.copy_(vector)
            return
        for part, piece in self._pieces(out, Span(0, self.shape[self.dim])):
            piece.copy_(self.full(vector).narrow(self.dim, part.start, part.numel))

    def vector(self, tensor: Tensor) -> Tensor:
        """All elements of the full tensor as a vector in this order; a view where that is possible."""
        if self.interleaved:
            return self.flat(tensor, Span(0, self.shape[self.dim]))
        if tensor.stride() != self.stride:
            dense = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = dense.copy_(tensor)
        return tensor.as_strided((self.numel,), (1,))

    def in_memory(self, flat: Tensor) -> Tensor:
        """The full tensor, from a vector in this order: a view of it where that is possible."""
        memory = torch.empty_like(flat) if self.interleaved else flat
        if self.interleaved:
            self.to_memory_order(flat, memory)
        return self.full(memory)

    def full(self, vector: Tensor) -> Tensor:
        """The full tensor as a view of a vector in memory order."""
        return vector.as_strided(self.shape, self.stride, vector.storage_offset())

    def _pieces(self, flat: Tensor, rows: Span) -> Iterator[tuple[Span, Tensor]]:
        """The rows of each part in these, and its tensor as a view of a vector of the elements of these rows."""
        at = flat.storage_offset()
        for part in self._within(rows):
            size, stride = self._form(part.numel)
            yield part, flat.as_strided(size, stride, at)
            at += math.prod(size)

    def _within(self, rows: Span) -> list[Span]:
        return [part for part in self.parts() if part.numel and part.clip(rows) == part]

    def _form(self, length: int) -> tuple[list[int], list[int]]:
        """Shape and strides of a part of so many rows."""
        size = [length if dim == self.dim else size for dim, size in enumerate(self.shape)]
        return size, list(nested_stride(size, self.stride))


def order_of(part: TensorShard | None, shape: tuple[int, ...], stride: tuple[int, ...]) -> Order:
    """The element order of the full tensor of a parameter whose local tensor has this shape and these strides."""
    if part is None:
        return Order(shape, stride)
    return Order(part.shape, nested_stride(part.shape, stride), part.dim, part.bounds)


def _hull(spans: Iterable[Span]) -> Span:
    found = list(spans)
    return Span(found[0].start, found[-1].stop)


def nested_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for a shape, with the dims in the same order as in the strides `like`."""
    stride, filled = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = filled
        filled *= max(shape[dim], 1)
    return tuple(stride)


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this shape and these strides is dense: no gaps, no overlap."""
    if len(shape) != len(stride):
        return False
    filled = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride) if size > 1):
        if step != filled:
            return 0 in shape
        filled *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as in safetensors."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def contiguous_order(shape: Sequence[int]) -> Order:
    """Row-major order, not split."""
    return Order(tuple(shape), contiguous_stride(shape))
