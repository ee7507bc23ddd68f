"""Buffers are reused, never shared, never more or larger than needed; the tracker's peak is exact."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.comm.buffers import Pool
from onefold.model.storage import storage_bytes, storage_key
from onefold.observe.tracker import CATEGORIES, Tracker

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8]

Take = tuple[int, torch.dtype]
takes = st.tuples(st.integers(0, 300), st.sampled_from(DTYPES))
gives = st.integers(0, 99)  # which of those out, counted around
runs = st.lists(st.one_of(takes, takes, gives), max_size=25)

fast = settings(max_examples=80, deadline=None, derandomize=True, database=None)


class Counted(Pool):
    """A pool that knows which buffers are out and what was asked for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.out: list[torch.Tensor] = []
        self.most_out = self.largest_bytes = 0

    def do(self, op: Take | int) -> None:
        if isinstance(op, tuple):
            self.out.append(self.take(*op))
            self.most_out = max(self.most_out, len(self.out))
            self.largest_bytes = max(self.largest_bytes, op[0] * op[1].itemsize)
        elif self.out:
            self.give(self.out.pop(op % len(self.out)))

    def play(self, ops: list[Take | int]) -> None:
        """All operations, then everything comes back."""
        for op in ops:
            self.do(op)
        while self.out:
            self.give(self.out.pop())


@fast
@given(runs)
def test_a_buffer_has_the_size_and_dtype_asked_for(ops):
    pool = Counted()
    for op in ops:
        pool.do(op)
        if isinstance(op, tuple):
            assert (pool.out[-1].shape, pool.out[-1].dtype) == ((op[0],), op[1])


@fast
@given(runs)
def test_buffers_that_are_out_at_once_never_share_memory(ops):
    pool = Counted()
    for op in ops:
        pool.do(op)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in pool.out if t.numel())
        assert all(one[1] <= two[0] for one, two in pairwise(spans))


@fast
@given(runs)
def test_writing_into_one_buffer_leaves_the_others_alone(ops):
    pool = Counted()
    marks: dict[int, int] = {}
    for number, op in enumerate(ops):
        pool.do(op)
        if isinstance(op, tuple):
            marks[storage_key(pool.out[-1])] = number
            pool.out[-1].fill_(number)
        for tensor in pool.out:
            assert bool((tensor == marks[storage_key(tensor)]).all())


@fast
@given(runs)
def test_there_are_as_many_buffers_as_were_ever_out_at_once_and_none_exceeds_the_largest_request(ops):
    pool = Counted()
    for op in ops:
        pool.do(op)
        assert len(pool.buffers()) == pool.most_out
        assert all(buffer.nbytes <= pool.largest_bytes for buffer in pool.buffers())


@fast
@given(runs)
def test_a_repeated_step_stops_allocating_and_never_starts_again(ops):
    pool = Counted()
    allocating = []
    for _ in range(8):
        before = {storage_key(buffer): buffer for buffer in pool.buffers()}  # held, so that keys are not reused
        pool.play(ops)
        allocating.append({storage_key(buffer) for buffer in pool.buffers()} != before.keys())
    assert not allocating[-1]
    assert allocating == sorted(allocating, reverse=True)


def test_a_backward_with_two_rounds_on_the_way_allocates_in_the_first_step_only():
    flat, scratch = (256, torch.float32), (128, torch.float32)
    step = [flat, scratch, flat, scratch, 0, 0, flat, scratch, 0, 0, flat, scratch, 0, 0]
    pool = Counted()
    pool.play(step)
    first = pool.buffers()
    pool.play(step)
    assert {id(buffer) for buffer in pool.buffers()} == {id(buffer) for buffer in first}
    assert sorted(buffer.nbytes for buffer in first) == [512, 512, 1024, 1024]


def test_the_smallest_free_buffer_that_fits_is_taken():
    pool = Pool(CPU)
    taken = [pool.take(numel, torch.uint8) for numel in (300, 100, 200)]
    for tensor in taken:
        pool.give(tensor)
    assert pool.take(101, torch.uint8).data_ptr() == taken[2].data_ptr()


def test_a_pool_that_keeps_nothing_counts_what_is_out_and_lets_go_of_what_comes_back():
    pool = Pool(CPU, keeps=False)
    first, second = pool.take(8, torch.float32), pool.take(4, torch.bfloat16)
    assert (first.dtype, first.numel(), second.dtype, second.numel()) == (torch.float32, 8, torch.bfloat16, 4)
    assert {storage_key(buffer) for buffer in pool.buffers()} == {storage_key(first), storage_key(second)}
    pool.give(first)
    pool.give(pool.take(2, torch.float32))
    assert [storage_key(buffer) for buffer in pool.buffers()] == [storage_key(second)]


def test_a_buffer_cannot_be_given_back_twice():
    pool = Pool(CPU)
    buffer = pool.take(8, torch.float32)
    pool.give(buffer)
    with pytest.raises(KeyError):
        pool.give(buffer)


def test_storage_bytes_counts_a_storage_once_however_many_views_it_has():
    base = torch.empty(100)
    assert storage_bytes([base, base[10:20], base.view(10, 10), torch.empty(5)]) == 420


# -- tracker -----------------------------------------------------------------------------------------------------------

MB = 1 << 20


def mb(size: int) -> torch.Tensor:
    return torch.empty(size * MB, dtype=torch.uint8)


def test_the_peak_of_a_known_sequence_of_allocations_is_exact():
    with Tracker(dict) as tracker:
        one, two = mb(1), mb(2)
        assert tracker.peak_bytes == 3 * MB
        del two
        four = mb(4)
        assert tracker.peak_bytes == 5 * MB
        del one, four
        mb(4)
    assert tracker.peak_bytes == 5 * MB
    assert tracker.peak() == dict.fromkeys(CATEGORIES, 0) | {"activations": 5 * MB}


def test_views_and_in_place_operations_cost_nothing_and_temporaries_count_while_they_live():
    base = mb(1)
    with Tracker(dict) as tracker:
        tracker.add([base])
        base.view(2, -1)[0].add_(1)
        base.detach()
        assert tracker.peak_bytes == MB
        base.add_(base + 1)
        base.add_(base + 1)
    assert tracker.peak_bytes == 2 * MB


def test_the_peak_is_broken_down_by_the_category_of_each_storage():
    known: dict[int, tuple[str, torch.Tensor]] = {}

    def claim(category: str, tensor: torch.Tensor) -> torch.Tensor:
        known[storage_key(tensor)] = (category, tensor)
        return tensor

    weight = claim("parameters", mb(3))
    with Tracker(lambda: known) as tracker:
        tracker.add([weight])
        temporary = mb(8)
        del temporary  # the peak so far: 3 parameters, 8 activations
        claim("gradients", mb(4))
        claim("optimizer", mb(5))
        mb(1)
    assert tracker.peak_bytes == 13 * MB
    wanted = {"parameters": 3 * MB, "gradients": 4 * MB, "optimizer": 5 * MB, "activations": MB}
    assert tracker.peak() == dict.fromkeys(CATEGORIES, 0) | wanted


def test_a_storage_claimed_after_the_peak_keeps_its_category_in_the_breakdown():
    known: dict[int, tuple[str, torch.Tensor]] = {}
    with Tracker(lambda: known) as tracker:
        state = mb(2)
        state.add_(1)  # the same storage, seen again
        known[storage_key(state)] = ("optimizer", state)
    assert tracker.peak()["optimizer"] == 2 * MB


def test_what_autograd_saves_for_backward_counts_as_activations():
    weight = torch.ones(1000, requires_grad=True)
    with Tracker(lambda: {storage_key(weight): ("parameters", weight)}) as tracker:
        tracker.add([weight])
        out = weight.exp()  # saved
        total = out.sum()
        assert tracker.peak() | {"activations": 0} == dict.fromkeys(CATEGORIES, 0) | {"parameters": 4000}
        assert tracker.peak()["activations"] == 4000 + total.nbytes
