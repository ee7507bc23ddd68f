"""Stored in parts or whole, by any strides: whoever asks in another order gets the same elements."""

from __future__ import annotations

import math
from itertools import accumulate, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onefold.checkpoint.format.manifest import VALUE, ParamRecord
from onefold.checkpoint.format.reading import read_in_order
from onefold.cost.layout import Span
from onefold.model.element_order import Order, contiguous_order, dense, nested_stride


def numbered(order: Order) -> Tensor:
    """By its stored number, each element's place in the whole, row by row."""
    whole = torch.arange(math.prod(order.shape)).view(order.shape)
    pieces = []
    for rows in order.parts():
        part = whole.narrow(order.dim, rows.start, rows.numel)
        nesting = sorted(range(part.ndim), key=lambda dim: (-order.stride[dim], dim))  # the outermost dim first
        pieces.append(part.permute(nesting).reshape(-1))
    return torch.cat(pieces)


class Stored:
    """A tensor in memory, in some order; counts what is read."""

    def __init__(self, order: Order) -> None:
        shape, stride, dim, bounds = order
        self.records = {"w": ParamRecord("w", "trained", shape, stride, {VALUE: "I64"}, dim=dim, bounds=bounds)}
        self._flat, self.read_numel = numbered(order), 0

    def read(self, name: str, span: Span, out: Tensor, state: str = VALUE) -> None:
        assert 0 <= span.start <= span.stop <= self._flat.numel()
        self.read_numel += span.numel
        out.copy_(self._flat[span.start : span.stop])


@st.composite
def orders(draw: st.DrawFn, shape: tuple[int, ...]) -> Order:
    nesting = draw(st.permutations(range(len(shape))))
    stride = nested_stride(shape, [len(shape) - nesting.index(dim) for dim in range(len(shape))])
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, shape[dim]), max_size=4))
    bounds = tuple(accumulate(sizes, lambda a, b: min(a + b, shape[dim]), initial=0))
    cut = draw(st.booleans())
    return Order(shape, stride, dim, (*bounds, shape[dim])) if cut else Order(shape, stride)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Order, Order, Span]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel - 1))
    return draw(orders(shape)), draw(orders(shape)), Span(start, draw(st.integers(start + 1, numel)))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_range_in_any_order_is_read_from_any_other(case: tuple[Order, Order, Span]) -> None:
    stored, wanted, span = case
    source = Stored(stored)
    out = torch.full((span.numel,), -1)
    read_in_order(source, "w", wanted, span, out)
    assert torch.equal(out, numbered(wanted)[span.start : span.stop])
    assert torch.equal(numbered(stored), numbered(wanted)) or not stored.same(wanted)
    assert source.read_numel <= math.prod(stored.shape)
    assert not stored.same(wanted) or source.read_numel == span.numel


def test_only_the_parts_that_matter_are_read() -> None:
    """Columns of a matrix in four parts, of which a rank of two wants half."""
    stored = Stored(Order((8, 16), (16, 1), 1, (0, 4, 8, 12, 16)))
    wanted = Order((8, 16), (16, 1), 1, (0, 8, 16))
    read_in_order(stored, "w", wanted, Span(70, 80), out := torch.empty(10, dtype=torch.long))
    assert stored.read_numel == 64
    assert torch.equal(out, numbered(wanted)[70:80])


def test_a_cut_along_the_slowest_dim_changes_nothing() -> None:
    assert Order((8, 4), (4, 1), 0, (0, 3, 8)).same(contiguous_order((8, 4)))
    assert not Order((8, 4), (4, 1), 1, (0, 3, 4)).same(contiguous_order((8, 4)))
    assert Order((1, 4), (4, 1), 1, (0, 3, 4)).same(contiguous_order((1, 4)))


@pytest.mark.parametrize("nesting", list(permutations(range(3))))
def test_strides_nest_as_asked_and_fill_memory(nesting: tuple[int, ...]) -> None:
    stride = nested_stride((2, 3, 4), nesting)
    assert dense((2, 3, 4), stride)
    assert sorted(range(3), key=lambda dim: stride[dim]) == sorted(range(3), key=lambda dim: nesting[dim])
