"""Offload(optimizer="auto") beside a disk that has no room for all that the device does not hold at first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onefold.offload.files import disk_share

SCRIPT = """
import gc
import json
import subprocess
import sys
from pathlib import Path

import onefold
from onefold.errors import OffloadError
from onefold.model.storage import storage_bytes
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import host_tensors
from tests.offload.test_auto import Outcome, Work, build, differing, step, tiers_of
from tests.offload.test_auto_parameters import parameter_tiers

def outcome(model, losses):
    return Outcome(losses, onefold.full_state_dict(model), 0, [], [], "", [])

def trained(offload):
    model, adam = build(work, offload)
    begun, refused = parameter_tiers(model), ""
    try:
        step(model, adam, work, 0)
    except OffloadError as error:
        onefold.full_state_dict(model)  # the model is as it was
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        adam.step()  # the same step again, now that there is room
        adam.zero_grad()
        refused = str(error)
    with onefold.track_memory(model) as seen:
        losses = [step(model, adam, work, number) for number in (1, 2)]
        engine_of(model).updates.wait()
    held = sum(storage_bytes(tensors) for tensors in host_tensors(engine_of(model)).values())
    return outcome(model, losses), begun, tiers_of(model), held, seen.peak_bytes, refused, model, adam

def names(tiers):
    return sorted({tier.value for tier in tiers})

def told():
    found, begun, tiers, held, peak, refused, model, adam = trained(offload)
    wrong = differing(trained(None)[0], found)
    run = disk.parent / f"checkpoints-{disk.name}"
    onefold.save(run, model, adam)
    del model, adam
    gc.collect()  # and files go
    model, adam = build(work, offload)
    onefold.load(run, model, adam)
    wrong += differing(found._replace(losses=[]), outcome(model, []))
    step(model, adam, work, 3)
    return told_of(begun, tiers, held, peak, wrong, refused)

def told_of(begun, tiers, held, peak, wrong, refused):
    return {
        "begun": names(begun), "tiers": names(tiers), "held": held, "peak": peak, "wrong": wrong, "refused": refused
    }

onefold.init()
for number, (device_bytes, host_bytes, inside, precision) in enumerate(json.loads(sys.argv[2])):
    disk = Path(sys.argv[1]) / str(number)
    precision = onefold.Precision(compute="bf16", master="fp32") if precision == "bf16" else precision
    work = Work(depth=8, width=128, rows=1, inside=inside, precision=precision)
    offload = onefold.Offload(optimizer="auto", device_bytes=device_bytes, host_bytes=host_bytes, path=disk)
    try:
        answer = told()
    except OffloadError as error:
        answer = told_of([], [], 0, 0, [], str(error))  # refused by Optimizer()
    print("told", json.dumps([number, answer]), flush=True)
    gc.collect()
"""
ALL = ["device", "disk", "host"]


class Case(NamedTuple):
    """Sizes in bytes. All state takes 4.2 MB in fp32, parameters 2.1 MB."""

    disk: int
    device: int
    host: int
    inside: bool = False
    precision: str = "fp32"


LARGE_DEVICE = Case(400_000, 16 << 20, 600_000)
WAITING = [
    Case(2_560_000, 6_000_000, 4_000_000),
    Case(2_560_000, 6_000_000, 3_000_000, inside=True),
    Case(2_560_000, 5_600_000, 4_000_000, precision="bf16"),
]
TOO_SMALL = [  # as step() says; it is called again on a larger disk
    Case(300_000, 4_000_000, 3_200_000),
    Case(1_000_000, 3_500_000, 2_500_000, inside=True),
    Case(2_560_000, 5_200_000, 3_500_000, precision="bf16"),
]
TOO_SMALL_AT_FIRST = Case(1_300_000, 5_000_000, 3_000_000, inside=True, precision="bf16")  # as Optimizer() says
OF_TWO_RANKS = [Case(3_000_000, 3_600_000, 2_000_000, inside=True), Case(2_000_000, 3_000_000, 2_000_000, inside=True)]


def on_small_disks(folder: Path, cases: Sequence[Case], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """What each rank told of each case, in processes that see a disk of its size for each."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    for number in range(len(cases)):
        (folder / str(number)).mkdir()
    mounts = [f"mount -t tmpfs -o size={case.disk} none {number} &&" for number, case in enumerate(cases)]
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", " ".join([*mounts, 'exec "$@"']), "sh"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], cwd=folder, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    launcher = ["-m", "onefold.cli.main", "run", "--ranks", str(ranks)] if ranks > 1 else []
    words = [sys.executable, *launcher, str(script), str(folder), json.dumps([case[1:] for case in cases])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*alone, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    told = [json.loads(line.split("told ", 1)[1]) for line in done.stdout.splitlines() if "told " in line]
    assert len(told) == ranks * len(cases), done.stdout
    return [[answer for other, answer in told if other == number] for number in range(len(cases))]


def assert_trained(told: dict[str, Any], case: Case) -> None:
    """To the bits of the run without offload, within the budgets after the first step."""
    assert told["refused"] == "" and told["wrong"] == [], (case, told)
    assert told["held"] <= case.host and told["peak"] <= case.device, (case, told)


def assert_trained_on_a_larger_disk(told: dict[str, Any], case: Case) -> None:
    assert "state on disk needs" in told["refused"], (case, told)
    assert told["wrong"] == [] and told["tiers"] != [], (case, told)
    assert told["held"] <= case.host and told["peak"] <= case.device, (case, told)


def test_one_rank_trains_and_resumes_beside_a_small_disk_and_is_told_of_one_that_is_too_small(tmp_path: Path) -> None:
    """The disks of WAITING hold what is on them after the first step. Before the device has any state, host and disk
    together have no room for that of units that might not fit there, nor for all of it when it is loaded."""
    cases = [LARGE_DEVICE, *WAITING, *TOO_SMALL, TOO_SMALL_AT_FIRST]
    found = dict(zip(cases, (told for (told,) in on_small_disks(tmp_path, cases)), strict=True))
    for case in (LARGE_DEVICE, *WAITING):
        assert_trained(found[case], case)
    assert found[LARGE_DEVICE]["begun"] == found[LARGE_DEVICE]["tiers"] == ["device"]
    assert [found[case]["tiers"] for case in WAITING] == [ALL] * len(WAITING)
    for case in TOO_SMALL:
        assert_trained_on_a_larger_disk(found[case], case)
    refused = found[TOO_SMALL_AT_FIRST]
    assert "state on disk needs" in refused["refused"] and refused["tiers"] == [], refused


def test_two_ranks_agree_on_what_a_small_disk_holds(tmp_path: Path) -> None:
    enough, too_small = on_small_disks(tmp_path, OF_TWO_RANKS, ranks=2)
    for told in enough:
        assert_trained(told, OF_TWO_RANKS[0])
        assert told["tiers"] == ALL
    for told in too_small:
        assert_trained_on_a_larger_disk(told, OF_TWO_RANKS[1])


def test_the_room_on_a_disk_is_that_of_the_folder_that_is_used(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_share("~") == disk_share(tmp_path) > 0 == disk_share(tmp_path / "missing")
