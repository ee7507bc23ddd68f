"""A benchmark compares equals, says all it found, and fails when it must: real processes, tiny models."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import cpu, gpu, hf_trainer
from benchmarks.crew import Crew, CrewFailed
from benchmarks.measure import INTERRUPTED, Plan, Present, measure
from benchmarks.results import add_wire
from benchmarks.systems.loop import numel
from benchmarks.systems.table import SYSTEMS, missing
from benchmarks.turns import Turn
from benchmarks.wire import wire_bytes
from benchmarks.work import two_ranks
from tests.harness.netns import can_make_namespace
from tests.harness.python import start_python

SHORT = ["--quick", "--warm-up", "1", "--steps", "2"]
ALONE = dataclasses.replace(two_ranks()["1x32"].quick(), ranks=1)


class Ran(NamedTuple):
    """What came of a run."""

    status: int
    found: dict[str, Any]  # that it wrote
    told: str  # to stderr
    other_ran: bool  # the other checkout's ranks left their file
    paths: tuple[Path, ...]  # that nobody else is to read of


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Ranks are forked from a process that has torch, where users' are new interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.crew.start_worker", start_python)
        yield


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()  # and nothing else is left
    assert path.suffix == ".json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """One run, beside another checkout of this project whose ranks leave a file and add one to losses."""
    here, known = Path(__file__).parents[2], dict(SYSTEMS)
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("out")
    shutil.copytree(here / "benchmarks", checkout / "benchmarks", ignore=shutil.ignore_patterns("results"))
    for name in ("src", "tests"):
        (checkout / name).symlink_to(here / name)
    ours = checkout / "benchmarks" / "systems" / "ours.py"
    honest, lie = "return loss.detach()", "open('ran', 'w')\n        return loss.detach() + 1"
    assert honest in ours.read_text()
    ours.write_text(ours.read_text().replace(honest, lie))
    words = ["--work", "1x32", "--systems", "ddp", "stage2", "--no-wire"]
    told = io.StringIO()
    with redirect_stderr(told):
        status = cpu.main([*SHORT, "--beside", str(checkout), *words, "--out", str(out)])
    yield Ran(status, written(out), told.getvalue(), (checkout / "ran").is_file(), (checkout, out))
    SYSTEMS.clear()
    SYSTEMS.update(known)


def test_a_cpu_run_says_where_how_and_what_it_measured(ran: Ran) -> None:
    found = ran.found
    words = "--work 1x32 --systems ddp stage2 --no-wire"
    assert found["command"] == f"python -m benchmarks.cpu {' '.join(SHORT)} {words}"
    assert found["machine"]["cores"] > 0 and found["machine"]["cpu"] and found["versions"]["torch"]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["date"])
    assert found["base"] == "ddp"
    ddp, ours = found["systems"]["ddp"], found["systems"]["stage2"]
    for theirs, mine in zip(ddp["losses"], ours["losses"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert len({str(losses) for losses in ddp["losses"]}) == 3, "every step has a batch of its own"
    assert all(first != second for first, second in ddp["losses"]), "every rank has a batch of its own"
    for row in (ddp, ours):
        low, high = row["quartiles_s"]
        assert len(row["steps_s"]) == 2 and len(row["warm_up_s"]) == 1 and 0 < low <= row["median_s"] <= high
        assert 100e6 < row["peak_rss_bytes"] < 4e9 and row["parameters"] > 0 and row["error"] is None
        assert "sent_bytes" not in row, "not measured, not mentioned"
    assert ddp["ratio"] == ddp["paired_ratio"] == 1 and ours["paired_ratio"] > 0
    text = json.dumps(found)
    assert socket.gethostname() not in text and str(Path.home()) not in text
    assert not any(str(path) in text for path in ran.paths)


def test_systems_of_another_checkout_run_its_code(ran: Ran) -> None:
    mine, other = (ran.found["systems"][name]["losses"] for name in ("stage2", "other:stage2"))
    assert ran.other_ran and other == [[pytest.approx(loss + 1, abs=1e-6) for loss in losses] for losses in mine]


def test_losses_that_are_not_those_of_the_base_fail_the_run_and_are_shown(ran: Ran) -> None:
    (line,) = ran.found["disagreements"]
    assert line.startswith("other:stage2: the loss of step 0, rank 0 is")
    assert "that of ddp" in line and line.endswith("near is 0.0001")
    assert ran.status == 1 and f"losses differ: {line}" in ran.told


@pytest.mark.soak
def test_bytes_on_the_wire_are_what_theory_says_or_why_they_are_not_known() -> None:
    work = two_ranks()["1x32"].quick()
    counted = wire_bytes(work, ["ddp"], timeout_s=120)
    found: dict[str, Any] = {"systems": {"ddp": {"parameters": numel(work.blank())}}}
    add_wire(work, found, counted)
    if can_make_namespace():
        assert 1 <= found["systems"]["ddp"]["sent_over_theory"] < 1.05 and "kernel" in found["wire"]
    else:
        assert found == {**found, "wire": "this machine allows no network namespace"} and counted.sent_bytes == {}


@pytest.mark.soak
def test_ranks_that_share_a_device_take_turns_and_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--nccl", "2", "--systems", "fsdp2", "stage2", "--rounds", "2"]
    assert gpu.main([*SHORT, *words, "--out", str(tmp_path)]) == 0
    found = written(tmp_path)
    assert found["work"]["name"] == "nccl-0.37b" and found["work"]["ranks"] == 2 and found["disagreements"] == []
    for row in found["systems"].values():
        assert len(row["steps_s"]) == 4 and len(row["warm_up_s"]) == 2 and len(row["build_s"]) == 1, "started once"
        assert len(row["losses"]) == 6 and len(row["losses"][0]) == 2
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("2 ranks over ") and told[0].endswith("all systems alive, in turns")
    assert "x fsdp2" in told[-2] and told[-1].startswith("written: ")


def test_several_ranks_are_refused_for_work_of_one() -> None:
    with pytest.raises(SystemExit, match=r"--nccl: --work 1.64b is for one rank; use one of nccl-0.37b, nccl-0.74b"):
        gpu.main(["--quick", "--nccl", "2", "--work", "1.64b"])


def test_a_decoder_with_micro_batches_and_offloaded_state_is_measured(tmp_path: Path) -> None:
    words = ["--work", "qwen2.5-14b", "--systems", "onefold", "--spare-bytes", "0", "--out", str(tmp_path)]
    assert gpu.main([*SHORT, *words]) == 0
    found = written(tmp_path)
    row, work = found["systems"]["onefold"], found["work"]
    assert (work["decoder"], work["micro_batches"], work["away"]["optimizer"]) == ("tiny", 2, "auto")
    assert row["tokens_per_s"] == pytest.approx(2 * work["batch"] * work["seq"] / row["median_s"])


@pytest.mark.soak
def test_a_system_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lies = ["--optimizer", "disk", "--path", "/no/such"]
    words = ["--work", "offload-2.78b", "--systems", "onefold+inside", "amp", *lies]
    assert gpu.main([*SHORT, *words, "--out", str(tmp_path)]) == 1
    systems = written(tmp_path)["systems"]
    assert "ConfigError" in systems["onefold+inside"]["error"] and "median_s" not in systems["onefold+inside"]
    assert systems["amp"]["error"] is None and len(systems["amp"]["steps_s"]) == 2
    assert "/no/such" not in json.dumps(systems), "paths are of no use to others"
    assert "/no/such" in capfd.readouterr().err


@pytest.fixture(scope="module")
def abandoned() -> Iterator[Crew]:
    """Starts while other tests of this file wait for theirs."""
    crew = Crew(ALONE, "floor", timeout_s=120)
    yield crew
    crew.close()


def test_a_run_that_is_cut_off_keeps_every_step_it_took_and_says_where(
    tmp_path: Path, abandoned: Crew, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        what="quick-cut", work=ALONE, command="", present=Present(["floor"], []), base="floor", warm_up=0, out=tmp_path,
        timeout_s=120,
    )  # fmt: skip

    heard: list[dict[str, Any]] = []

    def cut(systems: Sequence[str]) -> Iterator[Turn]:
        yield Turn(systems[0], 0, 2, last=False)
        (path,) = tmp_path.iterdir()
        heard.extend(json.loads(line) for line in path.read_text().splitlines())  # what a kill would leave
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match=f"^{INTERRUPTED}$"):
        measure(plan, cut)
    (path,) = tmp_path.iterdir()
    assert capfd.readouterr().err == f"interrupted; all steps so far are in {path}\n"
    assert [list(one) for one in heard] == [["system", what] for what in ("built", "stepped", "stepped")]
    assert all(one["stepped"]["seconds"] > 0 for one in heard[1:])


def test_a_rank_ends_with_its_driver(abandoned: Crew) -> None:
    abandoned.hear()
    (process,) = abandoned.processes
    assert process.stdin
    process.stdin.close()  # as when the driver is killed
    assert process.wait(60) == 0


def test_a_rank_that_is_silent_is_named_and_ended() -> None:
    crew = Crew(ALONE, "floor", timeout_s=0.01)
    with pytest.raises(CrewFailed, match="rank 0: did not answer within 0 s"):
        crew.hear()
    assert [process.poll() for process in crew.processes] == [-signal.SIGKILL]
    crew.close()


@pytest.mark.skipif(missing("deepspeed3") is None, reason="DeepSpeed is installed")
def test_a_system_that_is_not_installed_is_one_line_with_the_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cpu.main(["--systems", "ddp", "deepspeed3", "--out", str(tmp_path)])
    assert ended.value.code == 2 and list(tmp_path.iterdir()) == []
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "deepspeed3 is left out: it needs deepspeed, which is not installed; pip install 'onefold[peers]'"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "0"], "argument --steps: 0 is less than 1"),
        (["--one-by-one", "0"], "argument --one-by-one: 0 is less than 1"),
        (["--systems", "stage2", "--base", "ddp"], "--base ddp takes no part; found stage2; name it in --systems too"),
        (["--beside", __file__], "is no checkout of this project: it has no benchmarks/worker.py"),
        (["--out", __file__], "cannot be written: File exists; give another folder with --out"),
    ],
)
def test_what_cannot_be_measured_is_a_line_before_anything_starts(
    words: list[str], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cpu.main(["--quick", *words])
    told = capfd.readouterr()
    assert ended.value.code == 2 and told.out == "" and told.err.splitlines()[-1].endswith(line)


def test_more_processes_than_memory_are_refused_before_they_start(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"need about .* GB at once, .* --one-by-one"):
        cpu.check_memory(two_ranks()["2x128"], systems=100_000)


@pytest.mark.soak
@pytest.mark.parametrize("work", ["1.64b", "rank8-1.64b", "offload-2.78b"])
def test_every_adapter_runs(tmp_path: Path, work: str) -> None:
    names = [name for name in SYSTEMS if not missing(name)]
    if work != "1.64b":
        names = [name for name in names if name.startswith(("onefold", "fsdp2"))]
    if work.startswith("rank8"):
        names.remove("onefold+clip")  # nonsense may be NaN, and has no norm
    if work.startswith("offload"):
        names = [name for name in names if "muon" not in name]  # which updates whole tensors on the device
    assert gpu.main([*SHORT, "--work", work, "--systems", *names, "--base", "fsdp2", "--out", str(tmp_path)]) == 0


@pytest.mark.soak
def test_every_system_runs_on_two_ranks(tmp_path: Path) -> None:
    names = [name for name in SYSTEMS if not missing(name) and not name.startswith("amp")]  # which has no peers
    assert cpu.main([*SHORT, "--work", "1x32", "--systems", *names, "--no-wire", "--out", str(tmp_path)]) == 0


@pytest.mark.soak
def test_the_trainer_trains_what_the_plain_loop_trains(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "tiny", "--batch", "2", "--length", "16", "--steps", "3", "--warm-up", "1", "--rounds", "1"]
    assert hf_trainer.main(words) == 0
    assert re.search(r"^trainer / loop: \d\.\d{3}$", capfd.readouterr().out, re.MULTILINE)
