"""Who keeps a message from completing, from what ranks say of themselves."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onefold.comm.diagnosis import EXIT, SHUTDOWN, Beat, Overdue, Position, diagnose, gone, obituary
from onefold.comm.meter import Label
from onefold.errors import CommError

QUESTION = 7
WORLD = 6
OVERDUE = Overdue("gather", (0, 1, 2, 3), 14, Label("gather-forward", "blocks.3"), 3.0, 3.2)
CAME = Beat(QUESTION, {"gather": Position(14, "gather-forward of blocks.3")})
LATE = Beat(QUESTION, {"gather": Position(13, "gather-forward of blocks.2")})

members = st.sampled_from(OVERDUE.ranks)
labels = st.builds(Label, st.text(), st.text())
overdues = st.builds(
    Overdue, st.text(), st.lists(st.integers(0, 9)).map(tuple), st.integers(1), labels,
    st.floats(0, 600), st.floats(0, 600),
)  # fmt: skip
beats = st.builds(
    Beat, st.integers(0, 9), st.dictionaries(st.text(), st.builds(Position, st.integers(0), st.text())),
    st.lists(overdues, max_size=3).map(tuple), st.sampled_from(["", EXIT, SHUTDOWN]),
)  # fmt: skip


def world(**changed: Beat) -> dict[int, Beat]:
    return {rank: CAME for rank in range(WORLD)} | {int(name[1:]): beat for name, beat in changed.items()}


@given(beats)
def test_a_beat_survives_the_store(beat: Beat) -> None:
    assert Beat.decode(beat.encode()) == beat


@given(st.sets(members, min_size=1, max_size=3), st.sets(members))
def test_ranks_that_do_not_answer_are_named_before_ranks_that_are_late(silent: set[int], late: set[int]) -> None:
    said = world() | {rank: LATE for rank in late} | {rank: replace(CAME, answers=QUESTION - 1) for rank in silent}
    sentence = diagnose(OVERDUE, said, QUESTION)
    names = ", ".join(map(str, sorted(silent)))
    verb = "have ended or are stopped" if len(silent) > 1 else "has ended or is stopped"
    assert sentence.startswith(f"rank{'s' * (len(silent) > 1)} {names} {verb}"), sentence


@given(members)
def test_a_late_rank_is_named_with_the_message_and_its_last_one(late: int) -> None:
    assert diagnose(OVERDUE, world() | {late: LATE}, QUESTION) == (
        f"rank {late} has not come to message 14 on the link gather, gather-forward of blocks.3 (the last there was "
        f"gather-forward of blocks.2, message 13); look at rank {late}'s output first; gather-forward of blocks.3, "
        f"message 14 on the link gather has not completed for 3.2 s (timeout_s=3)"
    )


@given(members, st.sampled_from([EXIT, SHUTDOWN]), st.sets(members))
def test_a_rank_that_left_before_the_message_is_named_first(left: int, how: str, silent: set[int]) -> None:
    said = world() | {rank: Beat() for rank in silent} | {left: replace(LATE, left=how)}
    words = f"rank {left} has called shutdown()" if how == SHUTDOWN else f"rank {left} has ended (exit)"
    assert diagnose(OVERDUE, said, QUESTION).startswith(words)
    assert gone(OVERDUE, said).startswith(words)


@given(members, st.sampled_from([EXIT, SHUTDOWN]))
def test_a_rank_that_left_after_the_message_is_named_only_once_it_is_overdue(left: int, how: str) -> None:
    said = world() | {left: replace(CAME, left=how)}
    assert gone(OVERDUE, said) == ""
    assert diagnose(OVERDUE, said, QUESTION).startswith(f"rank {left} has ")


def test_where_all_have_come_the_network_hangs() -> None:
    assert "all of its ranks (ranks 0, 1, 2, 3) have come to it: the network hangs" in diagnose(
        OVERDUE, world(), QUESTION
    )


def test_a_late_rank_that_waits_for_another_is_not_the_cause() -> None:
    behind = Overdue("tp", (1, 5), 3, Label("reduce", "head"), 3.0, 3.1)
    waits = replace(LATE, waits=(behind,), links=LATE.links | {"tp": Position(3, "reduce of head")})
    assert diagnose(OVERDUE, world(r1=waits, r5=CAME), QUESTION).startswith(
        "rank 5 has not come to message 3 on the link tp"
    )
    assert diagnose(OVERDUE, world(r1=waits, r5=Beat()), QUESTION).startswith("rank 5 has ended or is stopped")
    came = replace(CAME, links=CAME.links | {"tp": Position(3, "reduce of head")})
    assert diagnose(OVERDUE, world(r1=waits, r5=came), QUESTION).startswith("rank 1 has not come to message 14")


def test_a_rank_outside_the_link_that_is_stopped_is_named_where_no_other_cause_is_known() -> None:
    assert diagnose(OVERDUE, world(r5=Beat()), QUESTION).startswith("rank 5 has ended or is stopped")


@given(st.dictionaries(st.integers(0, 5), beats), overdues)
def test_ranks_that_wait_for_each_other_end_in_one_line(said: dict[int, Beat], overdue: Overdue) -> None:
    circle = {rank: replace(LATE, waits=(OVERDUE,)) for rank in OVERDUE.ranks}
    assert diagnose(OVERDUE, circle, QUESTION).startswith("ranks 0, 1, 2, 3 have not come to message 14")
    assert diagnose(overdue, said, QUESTION)


def test_an_obituary_is_the_first_line_of_the_error() -> None:
    assert obituary(2, TypeError("a bad batch\nmore")) == (
        "rank 2 has ended by TypeError: a bad batch; look at rank 2's output first"
    )
    assert obituary(2, KeyboardInterrupt()) == "rank 2 has ended by KeyboardInterrupt; look at rank 2's output first"
    assert obituary(2, ValueError("rank 2: no")) == "rank 2 has ended by ValueError: no; look at rank 2's output first"
    assert obituary(2, CommError("rank 2: reduce of a got no answer from rank 1")) == (
        "reduce of a got no answer from rank 1 (found by rank 2)"
    )
