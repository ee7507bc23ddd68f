"""Sums over ranks are the left fold in rank order, bit for bit; the meter counts what was sent."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onefold.comm.meter import Flow, Label, Meter
from onefold.comm.sums import sum_in_order

fast = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def random_parts(seed: int, ranks: int, numel: int = 97) -> list[Tensor]:
    """Floats of all magnitudes, so that any other order of adding gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = [10.0 ** torch.randint(-30, 30, (numel,), generator=generator).float() for _ in range(ranks)]
    return [torch.randn(numel, generator=generator) * magnitude for magnitude in magnitudes]


def clones(parts: list[Tensor]) -> list[Tensor]:
    return [part.clone() for part in parts]


def left_fold(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


seeds, ranks = st.integers(0, 10_000), st.integers(1, 9)


@fast
@given(seeds, ranks)
def test_the_sum_is_the_left_fold_in_rank_order(seed, ranks):
    parts = random_parts(seed, ranks)
    out = torch.full_like(parts[0], torch.nan)
    sum_in_order(clones(parts), out, None)
    assert bits(out) == bits(left_fold(parts))


@fast
@given(seeds, ranks)
def test_what_earlier_rounds_left_is_added_last(seed, ranks):
    *parts, plus = random_parts(seed, ranks + 1)
    out = torch.full_like(plus, torch.nan)
    sum_in_order(clones(parts), out, plus.clone())
    assert bits(out) == bits(left_fold(parts) + plus)


@fast
@given(seeds, ranks, st.data())
def test_the_result_may_overwrite_any_part(seed, ranks, data):
    parts = random_parts(seed, ranks)
    scratch = clones(parts)
    out = scratch[data.draw(st.integers(0, ranks - 1))]
    sum_in_order(scratch, out, None)
    assert bits(out) == bits(left_fold(parts))


@fast
@given(seeds, ranks)
def test_the_result_may_overwrite_what_earlier_rounds_left(seed, ranks):
    *parts, plus = random_parts(seed, ranks + 1)
    out = plus.clone()
    sum_in_order(clones(parts), out, out)
    assert bits(out) == bits(left_fold(parts) + plus)


@fast
@given(seeds, ranks, st.data())
def test_the_result_may_overwrite_a_part_while_an_earlier_rounds_sum_is_added(seed, ranks, data):
    *parts, plus = random_parts(seed, ranks + 1)
    scratch = clones(parts)
    out = scratch[data.draw(st.integers(0, ranks - 1))]
    sum_in_order(scratch, out, plus.clone())
    assert bits(out) == bits(left_fold(parts) + plus)


@fast
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_single_floats_of_any_kind_add_up_in_order(numbers):
    parts = [torch.tensor([number]) for number in numbers]
    out = torch.empty(1)
    sum_in_order(clones(parts), out, None)
    assert bits(out) == bits(left_fold(parts))


def test_the_order_is_visible_in_these_numbers():
    numbers = [1e8, 1.0, -1e8, 1.0]  # 1 is lost beside 1e8; any other grouping keeps it
    out = torch.empty(1)
    sum_in_order([torch.tensor([number]) for number in numbers], out, None)
    assert out.item() == 1.0
    sum_in_order([torch.tensor([number]) for number in sorted(numbers)], out, None)
    assert out.item() == 0.0


def test_slots_of_one_buffer_are_summed_without_touching_their_neighbours():
    flat, scratch, neighbour = torch.arange(192.0), torch.ones(64), torch.arange(64.0)
    mine = flat[64:128]
    sum_in_order([scratch, mine], mine, None)
    assert torch.equal(flat, torch.cat([neighbour, torch.arange(65.0, 129.0), torch.arange(128.0, 192.0)]))


@pytest.mark.parametrize("plus", [None, torch.tensor([5.0])], ids=["alone", "with plus"])
def test_one_part_is_its_own_sum_and_the_result_is_no_view_of_it(plus):
    part, out = torch.tensor([3.0]), torch.zeros(1)
    sum_in_order([part], out, plus)
    part.zero_()
    assert out.item() == (3.0 if plus is None else 8.0)


# -- meter -------------------------------------------------------------------------------------------------------------


def test_the_meter_adds_bytes_and_calls_by_purpose_and_collective():
    meter = Meter()
    for purpose, collective, sent in [
        ("reduce", "rs", 10),
        ("reduce", "rs", 5),
        ("reduce", "ag", 1),
        ("norm", "ag", 0),
    ]:
        meter.count(purpose, collective, sent)
    assert meter.running == {("reduce", "rs"): Flow(15, 2), ("reduce", "ag"): Flow(1, 1), ("norm", "ag"): Flow(0, 1)}
    assert meter.last_step == {}


def test_a_cut_closes_the_step_and_starts_the_next_at_zero():
    meter = Meter()
    meter.count("reduce", "rs", 10)
    meter.cut()
    meter.count("reduce", "rs", 3)
    assert (meter.last_step, meter.running) == ({("reduce", "rs"): Flow(10, 1)}, {("reduce", "rs"): Flow(3, 1)})
    meter.cut()
    assert meter.last_step == {("reduce", "rs"): Flow(3, 1)}
    meter.cut()
    assert meter.last_step == {}


def test_two_meters_share_nothing():
    one, two = Meter(), Meter()
    one.count("reduce", "rs", 10)
    assert two.running == {}


def test_a_label_reads_as_what_it_is_for():
    assert str(Label("reduce", "layers.0")) == "reduce of layers.0"
