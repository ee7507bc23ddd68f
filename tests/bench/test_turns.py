"""Who comes when, and what follows from the times: pure functions of the harness."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import results
from benchmarks.turns import Record, Step, one_by_one, resting, together
from benchmarks.work import Work, one_gpu, two_ranks

NAMES = ("ddp", "fsdp2", "stage0", "stage3")
names = st.integers(1, 4).map(lambda count: list(NAMES[:count]))


@given(names, st.integers(1, 6))
def test_all_systems_step_once_per_round_and_each_comes_first_in_turn(systems: list[str], steps: int) -> None:
    turns = list(together(systems, steps=steps))
    rounds = [turns[at : at + len(systems)] for at in range(0, len(turns), len(systems))]
    assert len(rounds) == steps
    for number, one in enumerate(rounds):
        assert sorted(turn.system for turn in one) == sorted(systems)
        assert one[0].system == systems[number % len(systems)]
        assert all(turn.steps == 1 and turn.last == (number == steps - 1) for turn in one)


@given(names, st.integers(1, 6), st.integers(1, 3))
def test_one_by_one_every_life_is_one_turn(systems: list[str], steps: int, rounds: int) -> None:
    turns = list(one_by_one(systems, steps=steps, rounds=rounds))
    assert Counter(turn.system for turn in turns) == dict.fromkeys(systems, rounds)
    assert all(turn.last and turn.steps == steps for turn in turns)
    assert len({(turn.system, turn.life) for turn in turns}) == len(turns)


@given(names, st.integers(0, 3), st.integers(1, 6), st.integers(1, 3))
def test_systems_that_rest_stay_alive_until_their_last_turn(
    systems: list[str], warm_up: int, steps: int, rounds: int
) -> None:
    turns = list(resting(systems, warm_up=warm_up, steps=steps, rounds=rounds))
    assert Counter(turn.system for turn in turns) == dict.fromkeys(systems, rounds)
    assert {turn.life for turn in turns} == {0} and all(turn.steps - turn.warm == steps for turn in turns)
    assert [turn.last for turn in turns] == [number == rounds - 1 for number in range(rounds) for _ in systems]


def test_steps_behind_a_rest_do_not_count() -> None:
    found = record(9.0, 1.0, 5.0, 1.0)
    found.steps[2] = found.steps[2]._replace(counts=False)
    (row,) = results.summary(two_ranks()["1x32"], {"ddp": found}, base="ddp", warm_up=1).values()
    assert row["steps_s"] == [1.0, 1.0] and row["warm_up_s"] == [9.0, 5.0]


def record(*seconds: float, losses: tuple[float, ...] = ()) -> Record:
    found = Record()
    told = losses or (1.0,) * len(seconds)
    found.steps = [Step(0, at, one, [told[at]] * 2) for at, one in enumerate(seconds)]
    return found


def test_pairs_are_steps_of_the_same_round_and_warm_up_does_not_count() -> None:
    """The machine slows down by ten in the middle: the medians do not show who is slower, pairs do."""
    records = {"ddp": record(99.0, 1.0, 10.0, 10.0), "stage3": record(50.0, 2.0, 20.0, 2.0)}
    rows = results.summary(two_ranks()["1x32"], records, base="ddp", warm_up=1)
    assert rows["stage3"]["steps_s"] == [2.0, 20.0, 2.0] and rows["stage3"]["warm_up_s"] == [50.0]
    assert rows["stage3"]["ratio"] == pytest.approx(0.2) and rows["stage3"]["paired_ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize("loss", [1.001, float("nan")])
def test_a_loss_that_strays_is_named_and_nan_never_passes(loss: float) -> None:
    records = {"ddp": record(1, 1, losses=(1.0, 1.0)), "stage3": record(1, 1, losses=(1.00001, loss))}
    (line,) = results.disagreements(two_ranks()["1x32"], records, base="ddp")
    assert line.startswith("stage3: the loss of step 1, rank 0") and "near is 0.0001" in line


def test_only_the_first_loss_of_the_floor_is_held_to_the_base() -> None:
    work = two_ranks()["1x32"]
    records = {"ddp": record(1, 1), "floor": record(1, 1, losses=(1.0, 2.0))}
    assert results.disagreements(work, records, base="ddp") == []
    records["floor"] = record(1, 1, losses=(2.0, 1.0))
    assert len(results.disagreements(work, records, base="ddp")) == 1


@pytest.mark.parametrize("base", ["floor", "amp"])
def test_who_does_not_learn_is_found_out_in_bf16_whatever_the_base(base: str) -> None:
    """Losses of 1.64B parameters on an H200, where eight steps move them by 0.05; and those of a model that stands."""
    floor, amp = (11.1384, 11.1693, 11.1363, 11.1416), (11.1383, 11.1691, 11.1364, 11.1411)
    records = {"floor": record(1, 1, 1, 1, losses=floor), "amp": record(1, 1, 1, 1, losses=amp)}
    records["onefold"] = record(1, 1, 1, 1, losses=(11.1385, 11.1390, 11.1380, 11.1395))
    (line,) = results.disagreements(one_gpu()["1.64b"], records, base=base)
    assert line.startswith("onefold: the loss of step 1, rank 0") and "that of amp" in line


def test_losses_are_compared_also_where_the_base_took_no_step() -> None:
    records = {"ddp": record(), "fsdp2": record(1, losses=(2.0,)), "stage3": record(1, losses=(3.0,))}
    (line,) = results.disagreements(two_ranks()["1x32"], records, base="ddp")
    assert line.startswith("stage3: the loss of step 0, rank 0 is 3.0")


def test_batches_depend_on_rank_and_step_alone() -> None:
    work = two_ranks()["1x32"].quick()
    assert work.tokens(0, 0).equal(Work.read({**vars(work), "name": "other"}).tokens(0, 0))
    assert len({str(work.tokens(rank, step).tolist()) for rank in (0, 1) for step in (0, 1)}) == 4


def test_paths_of_this_machine_are_not_in_the_command() -> None:
    words = ["--out", "/a", "--quick", "--path=/b", "--path", "/c", "--steps", "2"]
    assert results.shown_command("benchmarks.gpu", words) == "python -m benchmarks.gpu --quick --steps 2"
