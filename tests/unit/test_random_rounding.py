"""Sums in bf16 that are rounded stochastically: unbiased, within one unit in the last place, the same wherever an
element's shard begins."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.state.random_rounding import add_rounded, keys_of

BF16 = torch.bfloat16


def added(total: torch.Tensor, plus: torch.Tensor, times: int) -> torch.Tensor:
    total = total.clone()
    for count in range(1, times + 1):
        add_rounded(total, plus, keys_of(1, "weight", count), 0)
    return total.float()


def test_small_gradients_that_are_all_alike_are_not_lost() -> None:
    """Each is a 39th of the sum's last bit, so that rounding to the nearest loses all of them."""
    numel, times, small = 4096, 64, 2.0**-7 / 39
    total, plus = torch.ones(numel, dtype=BF16), torch.full((numel,), small)
    mean = float(added(total, plus, times).mean())
    spread = (times * small * 2.0**-7 / numel) ** 0.5  # of the mean: each sum steps up with a small probability
    assert abs(mean - (1 + times * small)) < 5 * spread
    assert float(torch.ones(1, dtype=BF16).add(small)) == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=80), st.integers(0, 79))
def test_a_sum_is_one_of_the_two_nearest_and_does_not_depend_on_where_a_vector_is_cut(rows, cut) -> None:
    total = torch.tensor([row[0] for row in rows]).to(BF16)
    plus = torch.tensor([row[1] for row in rows])
    exact = total.float() + plus
    whole, parts = total.clone(), total.clone()
    keys = keys_of(2, "weight", 3)
    add_rounded(whole, plus, keys, 0)
    for start, stop in ((0, min(cut, len(rows))), (min(cut, len(rows)), len(rows))):
        if start < stop:
            add_rounded(parts[start:stop], plus[start:stop], keys, start)
    assert torch.equal(whole.view(torch.int16), parts.view(torch.int16))
    last = torch.maximum(exact.abs() * 2.0**-7, torch.tensor(2.0**-133))
    assert bool(((whole.float() - exact).abs() <= last).all())


def test_infinities_and_nans_stay() -> None:
    total = torch.tensor([1.0, float("inf"), float("nan"), 3e38], dtype=BF16)
    add_rounded(total, torch.tensor([float("-inf"), 1.0, 1.0, 0.0]), keys_of(1, "weight", 1), 0)
    assert total[:2].tolist() == [float("-inf"), float("inf")] and total[2].isnan() and total[3].isfinite()
