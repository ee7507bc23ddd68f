"""`onefold measure`: every part works here, its record is one that plans read, and bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.cli.main import main
from onefold.cost.rates import Rates, read_rates
from onefold.errors import ConfigError
from onefold.planner.device.clock import Clock
from onefold.planner.device.links import links
from onefold.planner.device.record import PARTS
from tests.harness import run_ranks

LEFT_OUT = ["links", "sustained", "copies"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Rates:
    folder = tmp_path_factory.mktemp("rates")
    assert main(["measure", "--quick", "--device", "cpu", "--disk", str(folder), "--out", str(folder / "a.json")]) == 0
    return read_rates(folder / "a.json")


def test_every_part_is_measured_and_what_is_left_out_is_said(record: Rates) -> None:
    found = record.record
    assert found["left_out"] == LEFT_OUT, "one rank has no links, a CPU no power limit and no copies to a device"
    assert {"device", "versions", "date", "command", "machine"} <= set(found)
    assert found["command"] == "onefold measure --device cpu --disk DIR --quick", "no path of this machine"
    for name in PARTS.keys() - set(LEFT_OUT):
        assert all(seconds > 0 for seconds in numbers(found[name])), name
    assert record.computes and record.lines()[-1] == "not measured: links, sustained, copies"


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [one for part in value.values() for one in numbers(part)]
    return [one for part in value for one in numbers(part)] if isinstance(value, list) else [float(str(value))]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--threads", "0"], "--threads 0 is not a number of threads"),
        (["--disk", "no-such-folder"], "--disk no-such-folder is no folder"),
        (["--out", "no-such-folder/a.json"], "make no-such-folder first"),
    ],
)
def test_bad_input_is_one_line(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--quick", *words]) == 2
    told = capsys.readouterr().err
    assert wanted in told and told.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', json.dumps({"work": 1})])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"onefold measure"):
        read_rates(tmp_path / "a.json")


def measured_links() -> dict[str, Any]:
    return links(Clock(torch.device("cpu"), 0.0, quick=True))


def test_two_ranks_measure_their_link_and_what_it_takes_from_their_cores() -> None:
    found = run_ranks(2, measured_links)
    assert found[0]["cores"] == found[1]["cores"], "of the rank that takes more"
    for part in ("all_gather", "reduce_scatter", "cores"):
        assert all(seconds >= 0 for _, seconds in found[0][part]), part
    assert [nbytes for nbytes, _ in found[0]["cores"]] == [1 << 18, 1 << 20]
    assert max(seconds for _, seconds in found[0]["cores"]) < 0.1, "of CPU time: the wait for a peer is not in it"
