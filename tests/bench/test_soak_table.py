"""docs/results/soak.md is what tests and benchmark recorded, and a test that failed is not left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.peer_checkpoints import KINDS
from tests.harness.soak import Soak
from tools import soak_table


def test_the_page_of_this_repository_is_what_its_results_say() -> None:
    assert soak_table.main(["--check"]) == 0
    assert set(soak_table.PEER_TRIALS) == set(KINDS)


def test_a_record_replaces_the_rows_of_its_kinds_and_counts_tests_that_failed(tmp_path: Path) -> None:
    for name in ("soak.md", "soak.json", "soak-peers.json"):
        shutil.copy(soak_table.RESULTS / name, tmp_path)
    before = json.loads((tmp_path / "soak.json").read_text())
    record = tmp_path / "deep" / "record"
    for trials, outcome in ((1500, "passed"), (7, "failed")):
        soak = Soak("bit flips", long=True)
        soak.tried(trials)
        soak.write(record, "tests/some.py::test", outcome, 61.5)
    assert soak_table.main([str(record), "--results", str(tmp_path)]) == 0
    after = json.loads((tmp_path / "soak.json").read_text())
    assert {name: row for name, row in after.items() if name != "bit flips"} == {
        name: row for name, row in before.items() if name != "bit flips"
    }
    line = next(line for line in (tmp_path / "soak.md").read_text().splitlines() if "One bit of a committed" in line)
    assert line.startswith("| 1,507 of 2,000 |") and "| 1 | 2 min (" in line
    mark = line.partition("2 min ")[2].partition(" ")[0]  # says on which machine the row was run
    assert f"{mark} {soak_table.where(after['bit flips'][0])}" in (tmp_path / "soak.md").read_text()
    assert soak_table.main(["--check", "--results", str(tmp_path)]) == 0


def test_trials_of_several_runs_are_summed_each_with_its_machine_and_none_is_counted_twice(tmp_path: Path) -> None:
    for name in ("soak.md", "soak.json", "soak-peers.json"):
        shutil.copy(soak_table.RESULTS / name, tmp_path)
    earlier = {"trials": 40, "lost": 1, "seconds": 600.0, "date": "2020-01-01", "machine": "another"}
    (tmp_path / "soak.json").write_text(json.dumps({"kills": [earlier]}))
    record = tmp_path / "record"
    soak = Soak("kills", long=True)
    soak.tried(60)
    soak.write(record, "tests/some.py::test[8]", "passed", 120.0)
    words = ["--add", str(record), "--results", str(tmp_path)]
    assert soak_table.main(words) == 0
    line = next(line for line in (tmp_path / "soak.md").read_text().splitlines() if line.startswith("| 100 |"))
    assert "| 1 | 12 min (40 a, 60 b) |" in line
    assert "(a) 2020-01-01, another; (b) " in (tmp_path / "soak.md").read_text()
    with pytest.raises(SystemExit, match=r"test\[8\] was counted already"):
        soak_table.main(words)
