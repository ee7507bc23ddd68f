"""docs/results/predicted.md is what `python -m benchmarks.predicted` writes, and what it says of its errors holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure_pair, predicted_cases
from benchmarks.predicted import PAGE, cases, error, main, peaks, times
from benchmarks.predicted_cases import DOCS, PAIR, PLANNED, RESULTS, Case, on_another_day
from benchmarks.predicted_cpu import RECORD, slower
from onefold.cost.compute import shape_seconds
from onefold.cost.hardware import recorded
from onefold.cost.rates import Rates, read_rates
from onefold.cost.shapes import Shape
from tests.harness.python import start_python


def test_the_page_is_current():
    assert main(["--check"]) == 0, "python -m benchmarks.predicted"
    assert PAGE.is_relative_to(RESULTS.parents[1] / "docs")


def test_no_measured_case_is_left_out():
    files = [path for path in RESULTS.glob("gpu-*.json") if PAIR.exists() or "nccl" not in path.name]
    files += [*DOCS.glob("nccl-*.json"), *DOCS.glob("rank*.json")]
    runs = [json.loads(path.read_text())["systems"] for path in files]
    ours = [name for systems in runs for name in systems if name.startswith(("onefold", "stage"))]
    starts = ("gpu-", "nccl-", "rank")
    assert set(ours) <= set(PLANNED) and len([case for case in cases() if case.source.startswith(starts)]) == len(ours)


def test_errors_are_of_predicted_over_measured():
    assert error([(1.1, 1.0), (0.7, 1.0), (2.0, 2.0)]) == (0.10000000000000009, 0.30000000000000004, 2, 3)
    found = cases()
    assert len(times(found)) == len(found) - len(apart(found)) > len(peaks(found))
    assert error(peaks(found)).worst < 0.05
    time = error(times(found))
    assert time.median <= 0.08
    assert time.worst <= 0.2 and time.within == time.count


def apart(found: list[Case]) -> list[Case]:
    return [case for case in found if case.apart]


def test_only_runs_of_pairs_do_not_count_whose_links_were_recorded_on_another_day():
    """The two dates are what the page says of them; a kind of machine is its GPU, its processor and their number."""
    recorded_on = json.loads(PAIR.read_text())["date"][:10]
    days = {path.name: json.loads(path.read_text())["date"][:10] for path in RESULTS.glob("gpu-nccl-*.json")}
    days |= {path.name: json.loads(path.read_text())["date"][:10] for path in DOCS.glob("nccl-*.json")}
    assert {case.source for case in apart(cases())} == {name for name, day in days.items() if day != recorded_on}
    assert len(days) > len({case.source for case in apart(cases())}), "no run of two NCCL ranks counts"
    record = json.loads(PAIR.read_text())
    result = {"date": record["date"], "machine": {**record["machine"], "gpu": record["device"]}}
    assert on_another_day(result, Rates(record)) == ""
    assert on_another_day({**result, "date": "2026-11-01 08:00 UTC"}, Rates(record)).startswith("2026-11-01, links")
    assert on_another_day({**result, "machine": {**result["machine"], "cores": 2}}, Rates(record))


def test_a_slower_device_takes_longer_for_all_that_it_computes_and_the_link_stays():
    rates = read_rates(RECORD)
    twice, once = recorded(slower(rates, 2.0)), recorded(rates)
    shape = Shape(layers=2, hidden=256, heads=4, seq=32, vocab=2048)
    seconds = [shape_seconds(shape, machine.rates, 1, "keep", width=4).total for machine in (twice, once)]
    assert seconds[0] == pytest.approx(2 * seconds[1]) and twice.node_link == once.node_link
    assert twice.memory_rate == pytest.approx(once.memory_rate / 2)


def test_two_ranks_record_their_link_and_the_cases_of_pairs_are_planned_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over gloo on a CPU: that the command runs, and what is made of its record."""
    monkeypatch.setattr("benchmarks.crew.start_worker", start_python)
    out = tmp_path / "pair.json"
    assert measure_pair.main(["--quick", "--out", str(out)]) == 0
    record = read_rates(out)
    assert record.record["command"] == "python -m benchmarks.measure_pair --quick"
    assert record.link_rate() is not None and record.record["shared"]["ranks"] == 2
    for part, columns in (("blocks", 4), ("updates", 3), ("messages", 8)):
        rows = record.record["shared"][part]
        assert rows and all(len(row) == columns and min(row) > 0 for row in rows), part
    monkeypatch.setattr(predicted_cases, "PAIR", out)
    found = list(predicted_cases.of_systems(RESULTS / "gpu-nccl-0.37b-nvidia-h200.json"))
    assert [case.name.partition(", ")[2] for case in found] == ["stage2", "onefold", "onefold+keep"]
    assert error(peaks(found)).worst < 0.05
    alone = predicted_cases.h200().rates
    assert alone is not None
    twice = predicted_cases.half_of(alone, Rates(known(record.record, blocks_s=2.0)), 1024)
    shape = Shape(layers=2, hidden=1024, heads=16, vocab=512)
    seconds = [shape_seconds(shape, rates, 8, "keep").total for rates in (alone, twice.rates) if rates]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01) and twice.beside_compute == (1.5, 2.0)
    assert twice.both_at_once == 1.25 and twice.slowed_by_messages == pytest.approx(1.1)
    assert twice.latency_s + (24 << 20) / 2 / twice.node_link == pytest.approx(1.0), "a gather of a block's unit"


def known(record: dict[str, Any], *, blocks_s: float) -> dict[str, Any]:
    """A record of pairs with figures that are easy to check."""
    messages = [[24 << 20, 1.0, 1.2, 1.5, 1.5, 2.0, 1.0, 1.1]]
    shared = {**record["shared"], "blocks": [[8192, 1024, 1.0, blocks_s]], "updates": [[1, 1.0, 2.0]]}
    return {**record, "shared": {**shared, "messages": messages}}
