"""Every instant is counted once, for the right thing: compared with a look at each instant by itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from onefold.observe.profiling.intervals import Stretch, at, covered, disjoint, innermost, shares

END = 40
times = st.integers(-5, END + 5)
stretches = st.builds(lambda a, b, label: Stretch(min(a, b), max(a, b), label), times, times, st.sampled_from("abc"))
layers = st.lists(st.lists(stretches, max_size=8), max_size=4)


def first_at(layer: list[Stretch[str]], instant: int) -> str | None:
    """Whoever began first of those that are there; among equals, the one that ends first."""
    there = [one for one in layer if one.start <= instant < one.stop]
    return min(there, key=lambda one: one[:2]).label if there else None


def tree(start: int, stop: int):
    """Events one inside the other, as a thread makes them."""
    if stop - start < 2:
        return st.just([])

    def inside(cuts: list[int]):
        edges = sorted(cuts)
        pairs = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]
        kids = [
            st.tuples(st.sampled_from("ab-"), tree(a + 1, b)).map(lambda k, a=a, b=b: _node(a, b, k)) for a, b in pairs
        ]
        return st.tuples(*kids).map(lambda lists: [event for events in lists for event in events])

    return st.lists(st.integers(start, stop), max_size=4, unique=True).flatmap(inside)


def _node(start: int, stop: int, kid: tuple[str, list[Stretch[str]]]) -> list[Stretch[str]]:
    return [Stretch(start, stop, kid[0]), *kid[1]]


@given(st.lists(stretches, max_size=10))
def test_neighbours_hold_each_instant_once(layer: list[Stretch[str]]) -> None:
    found = disjoint(layer)
    assert all(one.start < one.stop for one in found)
    assert all(before.stop <= after.start for before, after in pairwise(found))
    held = {instant for one in found for instant in range(one.start, one.stop)}
    assert held == {instant for one in layer for instant in range(one.start, one.stop)}


@given(layers, st.integers(0, END), st.integers(0, END))
def test_shares_are_those_of_the_first_layer_at_each_instant_and_add_up(
    layers: list[list[Stretch[str]]], start: int, stop: int
) -> None:
    found = shares(start, stop, layers, "rest")
    wanted = Counter(
        next((name for layer in layers if (name := at(disjoint(layer), instant))), "rest")
        for instant in range(start, stop)
    )
    assert found == wanted
    assert sum(found.values()) == max(stop - start, 0)


@given(st.lists(stretches, max_size=8), times)
def test_at_an_instant_is_whoever_came_first_and_still_is(layer: list[Stretch[str]], instant: int) -> None:
    assert (at(disjoint(layer), instant) is None) == (first_at(layer, instant) is None)
    alone = [one for one in layer if one.start <= instant < one.stop]
    if len(alone) == 1:
        assert at(disjoint(layer), instant) == alone[0].label


@given(tree(0, END))
def test_in_a_thread_each_instant_has_the_label_of_the_innermost_event_that_has_one(events: list[Stretch[str]]) -> None:
    found = innermost(events, lambda name, around: around if name == "-" else name)
    for instant in range(END):
        around = sorted((e for e in events if e.start <= instant < e.stop), key=lambda e: e.stop - e.start)
        wanted = next((event.label for event in around if event.label != "-"), None)
        assert at(found, instant) == wanted


def test_an_event_that_outlasts_the_one_around_it_is_cut_there() -> None:
    found = innermost([Stretch(0, 10, "a"), Stretch(5, 20, "b")], lambda name, around: name)
    assert found == [Stretch(0, 5, "a"), Stretch(5, 10, "b")]


@given(st.lists(stretches))
def test_time_that_several_share_counts_once(found: list[Stretch[str]]) -> None:
    assert covered(found) == len({tick for start, stop, _ in found for tick in range(start, stop)})
