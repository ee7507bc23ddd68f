"""Grids of cases. The suite takes a share of each, in which every value of every axis occurs; `--soak` takes all."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], share: int | None = None) -> list[Any]:
    """The product of the axes, one case in `share` of it for every run and the rest for --soak.

    Without `share`, the smallest share in which every value occurs: of two axes as many cases as the longer has values.

    @pytest.mark.parametrize(("model", "ranks"), thinned(MODELS, (1, 2, 3, 4)))
    """
    values = [list(axis) for axis in axes]
    spare = sum(len(axis) - 1 for axis in values)
    most = spare - max(len(axis) - 1 for axis in values) + 1
    share = most if share is None else share
    assert 1 < share <= most, f"of one case in {share} a value would occur in no run; use 2 to {most}"
    cases = []
    for places in product(*(range(len(axis)) for axis in values)):
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = [] if sum(places) % share == 0 else [pytest.mark.soak]
        cases.append(pytest.param(*case, marks=marks))
    return cases


def with_soak(cases: Iterable[Any], *soak: Any) -> list[Any]:
    """Cases of one axis, of which those in `soak`, that other cases hold in themselves, are left to --soak.

    @pytest.mark.parametrize("name", with_soak(MODELS, "plain"))
    """
    cases = list(cases)
    assert all(case in cases for case in soak), f"{soak} are not all among {cases}"
    return [pytest.param(case, marks=pytest.mark.soak) if case in soak else case for case in cases]
