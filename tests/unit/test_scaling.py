"""The loss scale falls on overflow, grows after a run of good steps, and never falls below its floor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import ConfigError
from onefold.optim.loss_scale import LossScale, Scaler


def test_it_falls_by_the_factor_and_grows_after_the_interval() -> None:
    scaler = Scaler(LossScale(initial=8.0, growth_interval=3))
    assert scaler.overflow() and scaler.scale == 4.0
    for expected in (4.0, 4.0, 8.0, 8.0):
        scaler.good()
        assert scaler.scale == expected


def test_an_overflow_starts_the_run_of_good_steps_anew() -> None:
    scaler = Scaler(LossScale(initial=8.0, growth_interval=2))
    scaler.good()
    scaler.overflow()
    scaler.good()
    assert scaler.scale == 4.0
    scaler.good()
    assert scaler.scale == 8.0


def test_hysteresis_bears_some_overflows() -> None:
    scaler = Scaler(LossScale(initial=8.0, hysteresis=3))
    assert [scaler.overflow() and scaler.scale for _ in range(4)] == [8.0, 8.0, 4.0, 2.0]


def test_at_the_floor_an_overflow_says_that_nothing_is_left() -> None:
    scaler = Scaler(LossScale(initial=4.0, floor=2.0))
    assert [scaler.overflow() for _ in range(3)] == [True, False, False]
    assert scaler.scale == 2.0


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 5))
def test_a_scale_stays_a_power_of_two_and_survives_saving(steps: list[bool], hysteresis: int, interval: int) -> None:
    settings = LossScale(initial=2.0**10, hysteresis=hysteresis, growth_interval=interval)
    scaler, twin = Scaler(settings), Scaler(settings)
    for good in steps:
        scaler.good() if good else scaler.overflow()
        twin.load(scaler.state())
        assert scaler.scale.hex().startswith("0x1.0000000000000p") and scaler.scale >= settings.floor
        assert twin.state() == scaler.state()


@pytest.mark.parametrize(
    "fields", [{"initial": 0}, {"factor": 1.0}, {"growth_interval": 0}, {"hysteresis": 1.5}, {"floor": 2.0**20}]
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LossScale(**fields)
