"""prefetch="auto" decides from the times of three passes; here the clock is ours."""

from __future__ import annotations

import logging

import pytest

from onefold.runtime.timer import TIMED_PASSES, GatherTimer

UNITS = 6


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def decide(gather_s: float, compute_s: float, live_bytes: int | None = None, slow_pass: int | None = None) -> int:
    """Watch passes in which every unit takes so long, nothing ahead; what it decides after the last."""
    clock = Clock()
    watch = GatherTimer([1000] * UNITS, live_bytes, clock)
    for number in range(TIMED_PASSES):
        for index in range(UNITS):
            watch.needed(index)
            watch.started(index)
            clock.now += gather_s * (10 if number == slow_pass else 1)
            watch.arrived(index)
            clock.now += compute_s
        decided = watch.end_of_pass("gather-forward")
        assert (decided is None) == (number + 1 < TIMED_PASSES)
    assert decided is not None
    return decided


@pytest.mark.parametrize(("gather_s", "compute_s", "wanted"), [(0.008, 0.010, 1), (0.010, 0.011, 1), (0.001, 0.1, 1)])
def test_a_gather_that_fits_under_one_unit_starts_one_ahead(gather_s: float, compute_s: float, wanted: int) -> None:
    assert decide(gather_s, compute_s) == wanted


@pytest.mark.parametrize("slow", range(TIMED_PASSES))
def test_a_pass_in_which_peers_were_late_is_not_taken_for_the_link(slow: int) -> None:
    assert decide(0.008, 0.010, slow_pass=slow) == 1


def test_it_says_when_the_link_is_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onefold"):
        assert decide(0.020, 0.010) == 1
    assert "the link is the limit" in caplog.text and "120.0 ms" in caplog.text


def test_it_says_nothing_when_compute_hides_the_gathers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onefold"):
        decide(0.008, 0.010)
    assert caplog.text == ""
