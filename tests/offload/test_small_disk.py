"""Offload(optimizer="auto") beside a disk that has no room for all that the device does not hold at first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from onefold.offload.files import disk_share

SMALL_DISK = """
import gc
import sys
from pathlib import Path

import onefold
from onefold.errors import OffloadError
from onefold.model.storage import storage_bytes
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import host_tensors
from tests.offload.test_auto import Outcome, Work, build, differing, step, tiers_of
from tests.offload.test_auto_parameters import parameter_tiers

def trained(offload):
    model, adam = build(work, offload)
    begun = parameter_tiers(model)
    try:
        losses = [step(model, adam, work, number) for number in range(3)]
    except OffloadError:
        onefold.full_state_dict(model)  # the model is as it was
        raise
    engine_of(model).updates.wait()
    held = sum(storage_bytes(tensors) for tensors in host_tensors(engine_of(model)).values())
    return Outcome(losses, onefold.full_state_dict(model), 0, [], [], "", []), begun, tiers_of(model), held, model, adam

def names(tiers):
    return ",".join(sorted({tier.value for tier in tiers}))

path, device_bytes, host_bytes, inside, precision = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
precision = onefold.Precision(compute="bf16", master="fp32") if precision == "bf16" else precision
work = Work(depth=8, width=128, rows=1, inside=bool(inside), precision=precision)
offload = onefold.Offload(optimizer="auto", device_bytes=device_bytes, host_bytes=host_bytes, path=path)
onefold.init()
try:
    found, begun, tiers, held, model, adam = trained(offload)
except OffloadError as error:
    print("refused:", error)
    sys.exit()
run = Path(path).parent / "checkpoints"
onefold.save(run, model, adam)
print(names(begun), names(tiers), held, differing(trained(None)[0], found), flush=True)
del model, adam
gc.collect()  # and files go
model, adam = build(work, offload)
onefold.load(run, model, adam)
again = Outcome([], onefold.full_state_dict(model), 0, [], [], "", [])
step(model, adam, work, 3)
print(differing(found._replace(losses=[]), again), flush=True)
"""


class OnSmallDisk(NamedTuple):
    """A run of whose ranks each told where parameters began, where state ended, what the host held, and whether bits
    are those of the run without offload, and those of a checkpoint that was loaded."""

    begun: str
    tiers: str
    refused: str


def on_a_small_disk(
    folder: Any, size: str, device_bytes: int, host_bytes: int, inside: int = 0, precision: str = "fp32", ranks: int = 1
) -> OnSmallDisk:
    """Trains in processes whose files are on a disk of this size; what the host holds must be within its budget."""
    script, disk = folder / "script.py", folder / "disk"
    script.write_text(SMALL_DISK)
    disk.mkdir()
    mount = ["sh", "-c", f'mount -t tmpfs -o size={size} none "$0" && exec "$@"', str(disk)]
    alone = ["unshare", "--user", "--map-root-user", "--mount", *mount]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    run = [sys.executable, "-m", "onefold.cli.main", "run", "--ranks", str(ranks), str(script), str(disk)]
    done = subprocess.run(
        [*alone, *run, str(device_bytes), str(host_bytes), str(inside), precision],
        capture_output=True, text=True, timeout=180, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line.split("] ", 1)[-1] for line in done.stdout.splitlines()]
    refused = [line for line in lines if line.startswith("refused:")]
    if refused:
        assert len(refused) == ranks, "one rank went on without the others"
        return OnSmallDisk("", "", refused[0])
    told = [line.split(" ", 3) for line in lines if "[]" in line and len(line.split(" ", 3)) == 4]
    assert len(told) == ranks and lines.count("[]") == ranks, done.stdout
    assert all(int(held) <= host_bytes and differs == "[]" for _, _, held, differs in told), done.stdout
    return OnSmallDisk(*told[0][:2], "")


def test_parameters_begin_on_the_device_where_neither_host_nor_disk_has_room_for_them(tmp_path: Any) -> None:
    assert on_a_small_disk(tmp_path, "400k", 16 << 20, 600_000) == ("device", "device", "")


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ("2500k", (6_000_000, 4_000_000)),
        ("2500k", (6_000_000, 3_000_000, 1)),
        ("2500k", (6_000_000, 4_000_000, 0, "bf16")),
        ("3000k", (3_600_000, 2_000_000, 1, "fp32", 2)),
    ],
    ids=str,
)
def test_all_units_wait_in_the_first_step_where_the_disk_holds_only_what_comes_after_it(
    size: str, settings: Any, tmp_path: Any
) -> None:
    """All state takes 4.2 MB in fp32. Before the device has any, host and disk together have no room for that of units
    that might not fit there. Nor have they for all of it when it is loaded."""
    assert on_a_small_disk(tmp_path, size, *settings).tiers == "device,disk,host"


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ("300k", (4_000_000, 2_500_000)),
        ("1000k", (3_500_000, 2_500_000, 1)),
        ("1300k", (5_000_000, 3_000_000, 1, "bf16")),
        ("2000k", (3_000_000, 2_000_000, 1, "fp32", 2)),
    ],
    ids=str,
)
def test_a_disk_that_is_too_small_is_told_before_anything_changes(size: str, settings: Any, tmp_path: Any) -> None:
    assert "state on disk needs" in on_a_small_disk(tmp_path, size, *settings).refused


def test_the_room_on_a_disk_is_that_of_the_folder_that_is_used(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_share("~") == disk_share(tmp_path) > 0 == disk_share(tmp_path / "missing")
