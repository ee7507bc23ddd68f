"""The order in which the elements of a tensor are stored: memory order, part by part if it is split over "tp".

Ranks of "tp" hold parts of a tensor, split along one dim. A checkpoint numbers the elements of the first part first,
then those of the second; nothing else in it depends on the ranks that wrote it. If the dim has the largest stride, the
parts one after the other are the full tensor in memory order, and the split changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span


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
        cuts = [one[2:] if one._matters else (0, ()) for one in (self, other)]
        return self.shape == other.shape and alike and cuts[0] == cuts[1]

    @property
    def _matters(self) -> bool:
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
        pieces, at = [], 0
        for part in self._within(rows):
            size, stride = self._form(part.numel)
            pieces.append(flat.as_strided(size, stride, flat.storage_offset() + at))
            at += math.prod(size)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def flat(self, tensor: Tensor, rows: Span) -> Tensor:
        """The elements of complete parts as a vector, from these rows of the tensor."""
        out, at = torch.empty(tensor.numel(), dtype=tensor.dtype), 0
        for part in self._within(rows):
            size, stride = self._form(part.numel)
            out.as_strided(size, stride, at).copy_(tensor.narrow(self.dim, part.start - rows.start, part.numel))
            at += math.prod(size)
        return out

    def _within(self, rows: Span) -> list[Span]:
        return [part for part in self.parts() if part.numel and part.clip(rows) == part]

    def _form(self, length: int) -> tuple[list[int], list[int]]:
        """Shape and strides of a part of so many rows."""
        size = [length if dim == self.dim else size for dim, size in enumerate(self.shape)]
        return size, list(nested_stride(size, self.stride))


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
