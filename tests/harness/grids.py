"""Grids of cases. The suite takes a share of each, in which every value of every axis occurs; `--soak` takes all."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], share: int = 2) -> list[Any]:
    """The product of the axes, one case in `share` of it for every run and the rest for --soak.

    @pytest.mark.parametrize(("model", "ranks"), thinned(MODELS, (1, 2, 3, 4)))
    """
    values = [list(axis) for axis in axes]
    spare = sum(len(axis) - 1 for axis in values)
    assert all(spare - (len(axis) - 1) >= share - 1 for axis in values), "a value would occur in no run"
    cases = []
    for places in product(*(range(len(axis)) for axis in values)):
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = [] if sum(places) % share == 0 else [pytest.mark.soak]
        cases.append(pytest.param(*case, marks=marks))
    return cases
