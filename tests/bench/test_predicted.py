"""docs/results/predicted.md is what `python -m benchmarks.predicted` writes, and what it says of its errors holds."""

from __future__ import annotations

import json

import pytest

from benchmarks.predicted import PAGE, cases, error, main, peaks, times
from benchmarks.predicted_cases import DOCS, PAIR, PLANNED, RESULTS, Case
from benchmarks.predicted_cpu import RECORD, slower
from onefold.cost.compute import shape_seconds
from onefold.cost.hardware import recorded
from onefold.cost.rates import read_rates
from onefold.cost.shapes import Shape


def test_the_page_is_current():
    assert main(["--check"]) == 0, "python -m benchmarks.predicted"
    assert PAGE.is_relative_to(RESULTS.parents[1] / "docs")


def test_no_measured_case_is_left_out():
    files = [path for path in RESULTS.glob("gpu-*.json") if PAIR.exists() or "nccl" not in path.name]
    runs = [json.loads(path.read_text())["systems"] for path in files]
    ours = [name for systems in runs for name in systems if name.startswith(("onefold", "stage"))]
    assert set(ours) <= set(PLANNED) and len([case for case in cases() if case.source.startswith("gpu-")]) == len(ours)


def test_errors_are_of_predicted_over_measured():
    assert error([(1.1, 1.0), (0.7, 1.0), (2.0, 2.0)]) == (0.10000000000000009, 0.30000000000000004, 2, 3)
    found = cases()
    assert len(times(found)) == len(found) - len(apart(found)) > len(peaks(found))
    assert error(peaks(found)).worst < 0.05
    time = error(times(found))
    assert time.median <= 0.08
    far = [case.name for case in found if not case.apart and abs(case.estimate.step_s / case.step_s - 1) > 0.2]
    assert all("CPU ranks" in name and name.endswith("stage 3") for name in far), far


def apart(found: list[Case]) -> list[Case]:
    return [case for case in found if case.apart]


def test_only_steps_that_do_not_say_what_copies_for_messages_took_do_not_count():
    files = [path for path in DOCS.glob("simulate-*.json") if not json.loads(path.read_text())[0].get("stand_ins_s")]
    assert sorted(case.source for case in apart(cases())) == sorted(path.name for path in files)


def test_a_slower_device_takes_longer_for_all_that_it_computes_and_the_link_stays():
    rates = read_rates(RECORD)
    twice, once = recorded(slower(rates, 2.0)), recorded(rates)
    shape = Shape(layers=2, hidden=256, heads=4, seq=32, vocab=2048)
    seconds = [shape_seconds(shape, machine.rates, 1, "keep", width=4).total for machine in (twice, once)]
    assert seconds[0] == pytest.approx(2 * seconds[1]) and twice.node_link == once.node_link
    assert twice.memory_rate == pytest.approx(once.memory_rate / 2)
