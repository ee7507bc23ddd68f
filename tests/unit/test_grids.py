"""Of a grid of cases every run takes a share in which every value occurs, and --soak takes all."""

import math

import pytest

from tests.harness.grids import thinned, with_soak


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3), (17, 2), (4, 2, 2), (6, 4, 4), (7, 4, 3, 2)])
def test_a_thinned_grid_holds_every_value_of_every_axis_in_every_run(sizes):
    cases = thinned(*map(range, sizes))
    kept = [case.values for case in cases if not case.marks]
    assert len({case.values for case in cases}) == math.prod(sizes)
    assert [len({case[axis] for case in kept}) for axis in range(len(sizes))] == list(sizes)
    assert len(kept) == max(sizes) if len(sizes) == 2 else len(kept) <= len(cases) // 2
    with pytest.raises(AssertionError, match="a value would occur in no run"):
        thinned(*map(range, sizes), share=sum(sizes))


def test_cases_left_to_soak_are_among_the_others():
    first, second = with_soak(["a", "b"], "b")
    assert first == "a" and second.values == ("b",) and [mark.name for mark in second.marks] == ["soak"]
    with pytest.raises(AssertionError, match="not all among"):
        with_soak(["a", "b"], "c")
