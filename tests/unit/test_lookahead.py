"""Look-ahead by the rule: the smallest number of units whose compute hides a gather, and no further."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cost.prefetch import choose, exposed_s

UNIT_BYTES = 400_000_000  # 200M parameters in 16 bit
COMPUTE_S = 0.010
LAYERS = 32


def equal(gather_s):
    return choose([gather_s] * LAYERS, [COMPUTE_S] * LAYERS, [UNIT_BYTES] * LAYERS)


def test_equal_units_look_one_ahead_at_50_100_and_200_gigabytes_per_second():
    for bandwidth in (50e9, 100e9, 200e9):
        assert equal(UNIT_BYTES / bandwidth) == (1, False, False)


def test_a_slow_link_is_named_instead_of_looking_further_ahead():
    assert equal(UNIT_BYTES / 25e9) == (1, True, False)


def test_on_a_slow_link_the_difference_stays_exposed_at_any_depth():
    """32 units, 16 ms each to gather, 10 ms to compute: 522 ms for the pass against 320, whatever the look-ahead."""
    for units in (1, 2, 8, 31):
        waited = exposed_s([0.016] * LAYERS, [COMPUTE_S] * LAYERS, units)
        assert abs(waited + LAYERS * COMPUTE_S - 0.522) < 1e-9


def test_unequal_units_start_early_enough_for_the_largest():
    gather = [0.001] * 8
    gather[5] = 0.025
    assert choose(gather, [COMPUTE_S] * 8, [1] * 8).units == 3


def test_memory_bounds_the_depth_and_says_so():
    gather = [0.001] * 8
    gather[5] = 0.035
    assert choose(gather, [COMPUTE_S] * 8, [100] * 8, budget_bytes=300) == (2, False, True)


def test_nothing_and_one_unit_need_no_look_ahead():
    assert choose([], [], []).units == 0
    assert choose([1.0], [2.0], [1]).units == 0


@settings(derandomize=True)
@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2, max_size=20))
def test_a_deeper_look_ahead_than_the_chosen_one_gains_nothing_but_what_the_link_owes(times):
    gather, compute = [g for g, _ in times], [c for _, c in times]
    chosen = choose(gather, compute, [1] * len(times))
    deepest = exposed_s(gather, compute, len(times))
    assert exposed_s(gather, compute, chosen.units) >= deepest - 1e-9
    assert exposed_s(gather, compute, 0) + 1e-9 >= exposed_s(gather, compute, chosen.units)
