"""What a run found, as JSON: the machine, the versions, the command, and of every system all that was measured."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import onefold
from benchmarks.systems.table import SYSTEMS
from benchmarks.turns import Record, Step
from benchmarks.work import Work
from onefold.cost.machine import processor

RESULTS = Path(__file__).parent / "results"
NEAR = {"fp32": 1e-4, "bf16": 0.005}  # how far losses may lie apart; bf16 rounds in other places in every system
FAR = {"fp32": 1e-4, "bf16": 0.05}  # from a base that need not agree: the floor keeps no fp32 values
PATHS = ("--beside", "--out", "--path")  # options whose values say nothing to others

PATH = re.compile(r"(?<![\w/])/[\w.-]+(/[\w.-]+)*")


def machine(cuda: bool) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": processor(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30), "gpu": None}
    if cuda:
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str | None]:
    try:
        deepspeed = version("deepspeed")
    except PackageNotFoundError:
        deepspeed = None
    return {
        "onefold": onefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deepspeed": deepspeed,
    }


def shown_command(module: str, arguments: Sequence[str]) -> str:
    """The command that was given, without the paths of this machine."""
    kept, skip = ["python", "-m", module], False
    for word in arguments:
        if not skip and not word.startswith(tuple(f"{option}=" for option in PATHS)):
            kept.append(word)
        skip = word in PATHS
        if skip:
            kept.pop()
    return " ".join(kept)


def facts(work: Work, command: str, base: str, warm_up: int) -> dict[str, Any]:
    """What is known before the first step."""
    what = {key: value for key, value in asdict(work).items() if key != "away"}
    if work.away:
        what["away"] = {"optimizer": work.away.optimizer, "parameters": work.away.parameters}
    return {
        "work": what,
        "machine": machine(work.device == "cuda"),
        "versions": versions(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "base": base,
        "warm_up": warm_up,
        "near": NEAR[work.precision],
    }


def file_of(folder: Path, what: str, found: dict[str, Any]) -> Path:
    """<what>-<machine>.json"""
    name = found["machine"]["gpu"] or f"{found['machine']['cpu']}-{found['machine']['cores']}-cores"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder / f"{what}-{slug}.json"


def write(path: Path, found: dict[str, Any]) -> None:
    """All of it or, if the run is cut off meanwhile, all that was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    beside.replace(path)


def summary(work: Work, records: dict[str, Record], *, base: str, warm_up: int) -> dict[str, Any]:
    """Of each system: what it took, beside the base; medians over all measured steps of all its lives."""
    theirs = measured(records[base], warm_up) if base in records else []
    return {name: row(work, record, theirs, warm_up) for name, record in records.items()}


def row(work: Work, record: Record, base: list[Step], warm_up: int) -> dict[str, Any]:
    steps = measured(record, warm_up)
    found: dict[str, Any] = {"error": record.error and PATH.sub("…", record.error)}
    if record.built:
        found |= record.built[0]
        found["build_s"] = [one["build_s"] for one in record.built]
    if steps:
        seconds = [step.seconds for step in steps]
        found |= {
            "median_s": statistics.median(seconds),
            "quartiles_s": statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=4, method="inclusive")[
                ::2
            ],
            "tokens_per_s": work.tokens_per_step / statistics.median(seconds),
        }
        found |= beside(steps, base)
        found["steps_s"] = seconds
    found["warm_up_s"] = [step.seconds for step in record.steps if step.step < warm_up or not step.counts]
    if work.rank_of == 1:  # else they mean nothing
        found["losses"] = [[plain(loss) for loss in step.losses] for step in record.steps if step.life == 0]
    for key in ("peak_rss_bytes", "peak_device_bytes", "peak_device_reserved_bytes"):
        if sizes := [one[key] for one in record.finished if key in one]:
            found[key] = max(sizes)
    if record.finished and record.finished[0]["says"]:
        found["says"] = record.finished[0]["says"].splitlines()
    return found


class Counted(NamedTuple):
    """What a rank sends in a step, by system; or why that is not known."""

    sent_bytes: dict[str, float]
    why_not: str | None = None


def add_wire(work: Work, found: dict[str, Any], counted: Counted) -> None:
    """What a rank sends in a step, and the same over theory."""
    found["wire"] = counted.why_not or "bytes that a rank sends in a step, by the kernel's counters"
    for name, sent in counted.sent_bytes.items():
        if name in found["systems"] and "parameters" in found["systems"][name]:
            row = found["systems"][name]
            theory = SYSTEMS[name].moves * 4 * row["parameters"] * (work.world - 1) / work.world
            row["sent_bytes"] = sent
            if theory:
                row["sent_over_theory"] = sent / theory


def beside(steps: list[Step], base: list[Step]) -> dict[str, float]:
    """Ratios to the base: of medians, and the median of those of the same life and step."""
    if not base:
        return {}
    theirs = {(step.life, step.step): step.seconds for step in base}
    pairs = [step.seconds / theirs[step.life, step.step] for step in steps if (step.life, step.step) in theirs]
    middle = statistics.median(step.seconds for step in base)
    found = {"ratio": statistics.median(step.seconds for step in steps) / middle}
    return found | ({"paired_ratio": statistics.median(pairs)} if pairs else {})


def plain(loss: float) -> float | str:
    """JSON has no NaN."""
    return loss if math.isfinite(loss) else str(loss)


def measured(record: Record, warm_up: int) -> list[Step]:
    return [step for step in record.steps if step.step >= warm_up and step.counts]


def disagreements(work: Work, records: dict[str, Record], *, base: str) -> list[str]:
    """Losses that are not those of the base, one line for each system. One rank without peers computes nonsense."""
    if work.rank_of > 1:
        return []
    lines = []
    for name, record in records.items():
        found = (stray(name, record, records, *one) for one in references(work, records, base))
        lines += [line for line in found if line][:1]
    return lines


def references(work: Work, records: dict[str, Record], base: str) -> list[tuple[str, float]]:
    """Whose losses all must have, and how nearly. Those who agree do so among themselves, whatever the base is, or
    if it took no step."""
    took = [name for name, record in records.items() if record.steps]
    agreeing = [name for name in took if SYSTEMS[name].agrees == "every step"]
    if base in agreeing:
        return [(base, NEAR[work.precision])]
    far = [(base, FAR[work.precision])] if base in took else []
    return far + [(name, NEAR[work.precision]) for name in agreeing[:1]]


def stray(name: str, record: Record, records: dict[str, Record], reference: str, near: float) -> str | None:
    """The first loss of a system that is too far from the reference's, in a line."""
    theirs = {step.step: step.losses for step in records[reference].steps}
    for step in record.steps:
        if SYSTEMS[name].agrees == "first step" and step.step > 0:
            continue
        for rank, (mine, wanted) in enumerate(zip(step.losses, theirs.get(step.step, ()), strict=False)):
            if not abs(mine - wanted) <= near:  # NaN is far from all
                where = f"step {step.step}, rank {rank}"
                return f"{name}: the loss of {where} is {mine:.6f}, that of {reference} {wanted:.6f}; near is {near:g}"
    return None
