"""Every window once per epoch; validation apart; the same global batch for any number of ranks and any split of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.train.run.sampling import Windows, permute, share

sizes = st.integers(1, 1000)
windows = st.builds(
    lambda total, seq, fraction: Windows.of(tokens=total * (seq + 1), seq=seq, val_fraction=fraction),
    st.integers(2, 1000),
    st.integers(1, 4000),
    st.sampled_from([0.05, 0.1, 0.25, 0.5]),
)


@settings(deadline=None)
@given(sizes, st.integers(0, 2**64))
def test_a_permutation_has_every_place_once(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_another_seed_and_another_epoch_give_another_order():
    found = Windows.of(tokens=100_000, seq=9, val_fraction=0.1)
    orders = [tuple(found.sample(seed, i) for i in range(50)) for seed in range(20)]
    orders += [tuple(found.sample(0, epoch * found.train + i) for i in range(50)) for epoch in range(1, 20)]
    assert len(set(orders)) == 39


@settings(deadline=None)
@given(windows)
def test_training_and_validation_share_no_window_and_leave_less_than_a_cycle_out(found):
    train = [found.train_window(i) for i in range(found.train)]
    val = [found.val_window(i) for i in range(found.val)]
    both = set(train) | set(val)
    assert len(both) == found.train + found.val <= found.total
    assert both <= set(range(found.total))
    assert found.total - len(both) < found.group
    assert found.val >= 1


@settings(deadline=None)
@given(windows, st.integers(0, 9))
def test_an_epoch_has_every_training_window_once(found, seed):
    for epoch in (0, 3):
        seen = [found.sample(seed, epoch * found.train + i) for i in range(found.train)]
        assert sorted(seen) == [found.train_window(i) for i in range(found.train)]


@settings(deadline=None)
@given(windows, st.integers(1, 100))
def test_evaluated_windows_are_different_ones_of_the_validation_part(found, count):
    chosen = found.evaluated(count)
    assert len(set(chosen)) == len(chosen) == min(count, found.val)
    assert set(chosen) <= {found.val_window(i) for i in range(found.val)}


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_a_step_has_the_same_samples_for_every_split(consumed, ranks, micro_batch, micros):
    batch = ranks * micro_batch * micros
    seen = [
        number
        for micro in range(micros)
        for rank in range(ranks)
        for number in share(consumed, ranks=ranks, rank=rank, micro_batch=micro_batch, micro=micro)
    ]
    assert sorted(seen) == list(range(consumed, consumed + batch))
