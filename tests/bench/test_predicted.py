"""docs/results/predicted.md is what `python -m benchmarks.predicted` writes, and what it says of its errors holds."""

from __future__ import annotations

import json

from benchmarks.predicted import PAGE, cases, error, main, peaks, times
from benchmarks.predicted_cases import PAIR, PLANNED, RESULTS


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
    assert len(times(found)) == len(found) > len(peaks(found))
    assert error(peaks(found)).worst < 0.05
