"""Rounds of updates: how many are under way at once is bounded in bytes, and follows from the sizes of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.optim.update_lanes import Lanes
from onefold.optim.whole_rounds import Rounds, RoundToSend
from onefold.runtime.update_policy import StepInputs

INPUTS = StepInputs([], 1.0, 1.0, None)
sizes = st.lists(st.integers(1, 9), max_size=12)


@dataclass
class Logged:
    """A round that writes down what becomes of it."""

    planned: RoundToSend
    log: list[tuple[str, int]]

    def begin(self) -> None:
        self.log.append(("send", int(self.planned.label)))

    def update(self, run: Any, lanes: Lanes, *, beside: bool) -> None:
        self.log.append(("update beside" if beside else "update", int(self.planned.label)))

    def end(self) -> None:
        self.log.append(("end", int(self.planned.label)))


def logged(by_unit: list[list[int]], most_bytes: int, lanes: int = 1) -> list[tuple[str, int]]:
    """What happens to rounds of these sizes: in backward, where those of each unit are left to travel."""
    log: list[tuple[str, int]] = []

    def make(planned: RoundToSend) -> Any:
        return Logged(planned, log)

    rounds, number = Rounds(make, print, print, most_bytes, Lanes(torch.device("cpu"), lanes)), 0
    for unit in by_unit:
        rounds.add([RoundToSend([], str(number + i), size, INPUTS) for i, size in enumerate(unit)])
        number += len(unit)
        rounds.update_all_but(len(unit))
        assert rounds.to_update == len(unit)
    rounds.drain()
    return log


@given(st.lists(sizes, max_size=4), st.integers(0, 40))
def test_tensors_under_way_fit_into_the_bound_or_are_one(by_unit: list[list[int]], most_bytes: int) -> None:
    size_of = [size for unit in by_unit for size in unit]
    under_way: list[int] = []
    for what, number in (log := logged(by_unit, most_bytes)):
        if what == "send":
            under_way.append(size_of[number])
            assert len(under_way) == 1 or sum(under_way) <= most_bytes
        elif what == "end":
            under_way.remove(size_of[number])
    for what in ("send", "update", "end"):  # each round once, in order
        assert [number for one, number in log if one == what] == list(range(len(size_of)))


@given(st.lists(sizes, max_size=4), st.integers(0, 40))
def test_rounds_are_updated_beside_each_other_where_two_are_under_way(
    by_unit: list[list[int]], most_bytes: int
) -> None:
    under_way: set[int] = set()
    updated: set[int] = set()
    for what, number in (log := logged(by_unit, most_bytes, lanes=2)):
        if what == "send":
            under_way.add(number)
        elif what == "end":
            under_way.remove(number)
            updated.remove(number)
        else:
            assert (what == "update beside") == (len(under_way) > 1)
            updated.add(number)
        assert len(updated) <= 2, "a lane has two updates"
    order = [(what.split()[0], number) for what, number in log]
    assert order == logged(by_unit, most_bytes), "messages have another order than without lanes"


def test_a_round_travels_while_another_is_updated() -> None:
    three = [("send", 0), ("send", 1), ("send", 2), ("update", 0), ("update", 1), ("end", 0)]
    assert logged([[2, 2, 2, 2]], 6)[:6] == three and logged([[2, 2, 2, 2]], 6)[6] == ("send", 3)
    one = [(what, number) for number in range(3) for what in ("send", "update", "end")]
    assert logged([[2, 2, 2]], 3) == one
    unit_by_unit = logged([[1], [1], [1]], 9)  # the first unit is updated when the second has been sent
    assert unit_by_unit[:5] == [("send", 0), ("send", 1), ("update", 0), ("send", 2), ("update", 1)]
