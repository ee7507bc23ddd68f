"""`onefold train --profile` says where a step goes, and bits stay the same: at every stage, offloaded, beside tp."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onefold.cli.main import main
from onefold.errors import OnefoldError
from onefold.observe.profiling.breakdown import Part
from onefold.train.run.records import read_profile
from tests.train.launched import curve, run
from tests.train.pooled import config_file, trained

STEPS, RECORDED = 5, 2
SHORT: dict[str, Any] = {
    "steps": {"steps": STEPS, "eval_every": 0}, "checkpoints": {"save_every": 0}, "data": {"data": __file__},
}  # fmt: skip
PROFILE = {"profile": True, "profile_steps": RECORDED}
TP = {"mesh": "shard=1,tp=2", "activations": "partition", "stage": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "plain"
    trained(2, out, **SHORT)
    return out


def check(out: Path, *parts: Part) -> None:
    """Each rank has a trace and figures that add up, with something in these parts."""
    for rank in range(2):
        events = json.loads(gzip.decompress((out / "profile" / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
        steps = [event["name"] for event in events if event["name"].startswith("onefold.profile")]
        assert steps == ["onefold.profile step 3", "onefold.profile step 4"]
    found = read_profile(out)
    assert [(one.rank, one.ranks, len(one.steps)) for one in found] == [(0, 2, RECORDED), (1, 2, RECORDED)]
    for one in found:
        assert all(sum(step.parts_ns.values()) == step.wall_ns for step in one.steps)
        assert all(one.part_s(part) > 0 for part in (Part.FORWARD, Part.BACKWARD, Part.UPDATE, *parts))
    assert (out / "profile" / "summary.txt").read_text().startswith(f"{RECORDED} steps of rank 0 of 2 (cpu)")


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_profiled_run_has_the_bits_of_one_that_is_not(plain: Path, tmp_path: Path, stage: int) -> None:
    trained(2, tmp_path / "run", **SHORT, zero={"stage": stage}, output=PROFILE)  # stages give the same bits
    assert curve(tmp_path / "run") == curve(plain)
    check(tmp_path / "run", Part.GATHER, Part.REDUCE)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"zero": {"offload": "host", "precision": "bf16"}, "adam": {"clip": 0.0}}, (Part.HOST,)),
        ({"zero": TP}, (Part.TENSOR, Part.AGAIN)),
    ],
)
def test_so_has_one_with_states_on_the_host_and_one_beside_tensor_parallelism(
    tmp_path: Path, fields: dict[str, Any], parts: tuple[Part, ...]
) -> None:
    trained(2, tmp_path / "plain", **SHORT, **fields)
    trained(2, tmp_path / "run", **SHORT, **fields, output=PROFILE)
    assert curve(tmp_path / "run") == curve(tmp_path / "plain")
    check(tmp_path / "run", *parts)


def test_a_run_that_goes_on_and_ends_early_has_the_steps_it_saw(plain: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(plain, tmp_path / "run"))
    fields = SHORT | {"steps": {"steps": STEPS + 3, "eval_every": 0}, "checkpoints": {"save_every": 0, "resume": True}}
    trained(2, out, **fields, output={"profile": True, "profile_steps": 6})
    assert [len(one.steps) for one in read_profile(out)] == [1, 1]


def test_the_command_prints_it_writes_it_down_and_reports_it(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ("--config", str(config_file(out, **SHORT)), "--ranks", "2", "--profile", "--profile-steps", str(RECORDED))
    code, said, complaints = run(out, *flags)
    assert code == 0 and complaints == ""
    assert curve(out) == curve(plain)
    check(out, Part.GATHER, Part.REDUCE)
    assert (out / "profile" / "summary.txt").read_text() in said and "exposed gathers" in said
    page = (out / "report.html").read_text()
    assert "Where a step goes" in page and "exposed gathers" in page


def test_a_run_that_is_too_short_for_its_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--steps", "4", "--profile"]) == 2
    assert "raise it, or lower --profile-steps" in capsys.readouterr().err


def test_figures_that_are_none_are_named(tmp_path: Path) -> None:
    assert read_profile(tmp_path) == []
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "summary.json").write_text('[{"rank": 0}]')
    with pytest.raises(OnefoldError, match="remove it"):
        read_profile(tmp_path)
