"""What one rank does to start and in a step does not grow with the number of ranks: calls, lines and messages counted.

Rank 0 of 8 and of 4096, whose peers are not there, as if over NCCL. The model is small, so that one loop over 4096
ranks would stand out. Counts are the same in every run: no clock is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import pytest

import onefold
from benchmarks.rank_of_many import Rank, Toy
from onefold.comm.meter import Flow
from onefold.comm.strategy import max_rounds

FEW, MANY = 8, 4096
UNITS, PARAMETERS = 20, 8
ELEMENTS = MANY * 64 // PARAMETERS  # of a parameter: no layout is padded, and a shard has elements of one parameter
NEAR = 0.02


class Counted(NamedTuple):
    start_calls: int
    step_calls: int
    step_lines: int
    sent: dict[tuple[str, str], Flow]


def calls_of(work: Callable[[], Any]) -> int:
    """Calls of functions, in Python and in C."""
    return seen_by(sys.setprofile, sys.getprofile(), {"call", "c_call"}, work)


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of Python, each iteration of a loop or comprehension counted again."""
    return seen_by(sys.settrace, sys.gettrace(), {"line"}, work)


def seen_by(install: Callable[[Any], None], before: Any, events: set[str], work: Callable[[], Any]) -> int:
    seen = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        seen += event in events
        return note

    install(note)
    try:
        work()
    finally:
        install(before)
    return seen


def counted(ranks: int, stage: int) -> Counted:
    made: list[Rank] = []
    model = Toy(UNITS, PARAMETERS, ELEMENTS)
    start_calls = calls_of(lambda: made.append(Rank(ranks, stage, model)))
    for _ in range(3):  # learns orders, makes buffers
        made[0].step()
    step_calls, step_lines = calls_of(made[0].step), lines_of(made[0].step)
    return Counted(start_calls, step_calls, step_lines, onefold.traffic(model).flows)


@pytest.fixture(scope="module", params=[1, 2, 3])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Counted, Counted]]:
    onefold.init()
    counted(FEW, request.param)  # imports what is imported at first use
    yield counted(FEW, request.param), counted(MANY, request.param)


@pytest.mark.parametrize("what", ["start_calls", "step_calls", "step_lines"])
def test_a_rank_of_4096_does_no_more_than_a_rank_of_8(both: tuple[Counted, Counted], what: str) -> None:
    few, many = (getattr(one, what) for one in both)
    assert few > 1000
    assert many - few <= NEAR * few, f"{what}: {few:,} of {FEW} ranks, {many:,} of {MANY}"


def test_a_rank_of_4096_starts_as_many_messages_as_a_rank_of_8(both: tuple[Counted, Counted]) -> None:
    few, many = ({key: flow.calls for key, flow in one.sent.items()} for one in both)
    assert few == many


def test_messages_that_are_no_training_state_stay_small(both: tuple[Counted, Counted]) -> None:
    """Flags: P bytes in each of log2 N rounds. The norm: one number of each rank."""
    flags = UNITS * PARAMETERS + UNITS + 17  # and a digest of what ranks must do alike, and whether one takes more
    for ranks, one in zip((FEW, MANY), both, strict=True):
        small = {key[0]: flow.sent_bytes for key, flow in one.sent.items() if key[0] in ("used-flags", "norm")}
        assert small == {"used-flags": flags * max_rounds(ranks), "norm": 8 * (ranks - 1)}
