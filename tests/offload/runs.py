"""A run with and without offload, on the same rank: what every test of tiers compares."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import onefold
from onefold.offload.disk import DiskFile
from tests.parity.training import Run, differing, same_bits, train

SPLIT = onefold.Precision(compute="bf16", master="split")
PRECISIONS: dict[str, Any] = {"fp32": "fp32", "bf16": "bf16", "split": SPLIT, "fp16": "fp16"}
TIERS: dict[str, dict[str, str]] = {
    "optimizer on the host": {"optimizer": "host"},
    "optimizer on disk": {"optimizer": "disk"},
    "both on the host": {"optimizer": "host", "parameters": "host"},
    "parameters on the host, optimizer on disk": {"optimizer": "disk", "parameters": "host"},
    "both on disk": {"optimizer": "disk", "parameters": "disk"},
}


def files_in(folder: str) -> list[DiskFile]:
    """The files that this process has open in a folder for state."""
    found = [one for one in gc.get_objects() if type(one) is DiskFile and one.shut.alive]
    return [file for file in found if file.scratch.path == Path(folder)]


def stages_of(tiers: str) -> tuple[int, ...]:
    return (3,) if "parameters" in TIERS[tiers] else (1, 2, 3)


def offload_of(tiers: str, path: str) -> onefold.Offload:
    fields: dict[str, Any] = TIERS[tiers]
    return onefold.Offload(**fields, path=path if "disk" in fields.values() else None)


def with_fields(run: Run, **fields: Any) -> Run:
    return dataclasses.replace(run, fields=(*run.fields, *fields.items()))


def compare(run: Run, offload: onefold.Offload) -> list[str]:
    """On every rank: what differs when states lie elsewhere."""
    plain, moved = train(run), train(with_fields(run, offload=offload))
    found = [f"parameter {name}" for name in differing(moved, plain)]
    if not all(same_bits(a, b) for a, b in zip(moved.norms, plain.norms, strict=True)):
        found.append(f"gradient norms {moved.norms} instead of {plain.norms}")
    if moved.losses != plain.losses:
        found.append(f"losses {moved.losses} instead of {plain.losses}")
    return found
