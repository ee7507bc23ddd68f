"""docs/results/paper.md is what `python -m benchmarks.paper` writes, and its conclusion on C2 and C3 holds."""

import pytest

from benchmarks.paper import FIGURE_8, PAGE, figure_3, figure_4, main, table_2, with_copy
from benchmarks.paper_configs import PAPER_BATCHES, priced
from onefold.cost.search import fits, most
from onefold.cost.shapes import PAPER


def test_the_pages_tables_are_those_of_the_planner_today():
    page = PAGE.read_text().splitlines()
    for part in (table_2, figure_3, figure_4):  # test_golden.py has table 1
        lines = [line for line in part() if line]
        assert [line for line in lines if line not in page] == [], f"{part.__name__}: python -m benchmarks.paper"


def test_the_guide_to_planning_quotes_the_page():
    page, guide = PAGE.read_text(), " ".join((PAGE.parent.parent / "planning.md").read_text().split())
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in page.splitlines() if line.startswith("|")}
    first, last = ([cell.strip() for cell in cells[ranks]] for ranks in ("64", "400"))
    gains = [f"{100 * (float(last[at].rstrip('×')) - 1):.1f}%" for at in (5, 2)]
    batches = f"{first[3]} sequences per replica, then {last[3]}"
    assert f"gains {gains[0]} over linear at the largest batch that fits ({batches}), and {gains[1]} at" in guide
    assert f"with data parallelism alone; {cells['13B (ZeRO)'][-1].strip()}." in guide


@pytest.mark.soak
def test_the_whole_page_is_current():
    assert main(["--check"]) == 0


def test_a_second_copy_of_unsharded_gradients_puts_c2_below_c3_as_in_the_paper():
    shape = PAPER["60b-wide-128"].shape

    def largest(name: str, accept) -> int:
        return most(lambda batch: accept(priced(name, shape, 128, batch)), 100)

    assert PAPER_BATCHES["C2"] < PAPER_BATCHES["C3"] == 8
    assert (largest("C2", fits), largest("C3", fits)) == (44, 11)
    assert (largest("C2", with_copy), largest("C3", with_copy)) == (6, 11)
    peaks = [priced("C1", shape, 128, batch) for batch in (2, 3)]
    taken = [(e.peak_bytes + 2 * e.sizes.numel) / 1e9 for e in peaks]
    assert taken[0] == pytest.approx(31.8, abs=0.05) and taken[1] > 32
    assert "44 and 11 fit" in FIGURE_8 and "6 and 11 fit" in FIGURE_8
