"""The CPU cases of docs/results/predicted.md: two ranks, over links of a given rate and over the loopback device.

Other programs may use the CPU too, so the runs also time compute alone, in which each rank trains a model of its own.
The recorded seconds of the CPU are multiplied by the measured over the planned time of that; links are as they were
measured in the run. So a plan is told how fast the CPU and the link were, and nothing of the stages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import Hardware, recorded
from onefold.cost.rates import Link, Rates, read_rates
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.work import Work, grid_of
from onefold.settings.widths import widths_of
from onefold.settings.zero import Zero

RESULTS = Path(__file__).resolve().parent / "results"
MACHINE = "neoverse-n1-2-cores"
RECORD = RESULTS / f"rates-{MACHINE}.json"
SHAPED = RESULTS / f"shaped-links-{MACHINE}.json"
LOOPBACK = RESULTS / "sweep-cpu.json"
ALONE = "floor"
DEVICE_PARTS = ("products", "attention", "elementwise", "loss", "blocks", "sustained", "updates", "host")
SECONDS_FROM = {"products": 3, "attention": 3, "elementwise": 1, "loss": 2, "blocks": 4, "sustained": 4, "updates": 2}


class Run(NamedTuple):
    """One stage over one link."""

    name: str
    source: str
    estimate: Estimate
    step_s: float


def slower(rates: Rates, times: float, parts: Collection[str] = DEVICE_PARTS) -> Rates:
    """A device that takes so many times as long for everything it computes, or for these parts."""

    def row(part: str, found: Any) -> Any:
        if isinstance(found, Mapping):
            return {key: row(part, more) for key, more in found.items()}
        if isinstance(found, float):  # of the host
            return found * times
        return [[*one[: SECONDS_FROM[part]], *(s * times for s in one[SECONDS_FROM[part] :])] for one in found]

    return Rates({**rates.record, **{part: row(part, rates.record.get(part, {})) for part in parts}})


def cpu_runs() -> Iterator[Run]:
    """All of them; none before this CPU was recorded."""
    if not RECORD.exists():
        return
    rates = read_rates(RECORD)
    if SHAPED.exists():
        found = json.loads(SHAPED.read_text())
        for over in found["over"]:
            link = Rates({"links": over["links"]}).link_rate()
            assert link is not None
            name = f"2 CPU ranks, {over['mbit_per_s']:,} Mbit/s"
            yield from _stages(name, SHAPED.name, found["work"], over["systems"], rates, link)
    for path in sorted(RESULTS.glob(f"cpu-*-{MACHINE}.json")):
        found = json.loads(path.read_text())
        name = f"2 CPU ranks, loopback, {found['work']['name']}"
        yield from _stages(name, path.name, found["work"], found["systems"], rates, _loopback())


def _loopback() -> Link:
    """Of gloo on this machine's loopback device, between units of the default size."""
    rows = json.loads(LOOPBACK.read_text())["alone"]
    least, most = rows[0], rows[-1]
    rate = most["gather_bytes_per_s"]
    sent = least["unit_bytes"] / 2
    return Link(max(0.0, sent / least["gather_bytes_per_s"] - sent / rate), rate)


def _stages(
    name: str, source: str, work: Mapping[str, Any], systems: Mapping[str, Any], rates: Rates, link: Link
) -> Iterator[Run]:
    shape = Shape(
        layers=work["layers"], hidden=work["dim"], heads=max(1, work["dim"] // 64), seq=work["seq"],
        vocab=work["vocab"], tied=False,
    )  # fmt: skip
    alone = systems[ALONE]["median_s"] / _planned(shape, recorded(rates), 0, 1, work["batch"]).step_s
    machine = dataclasses.replace(
        recorded(slower(rates, alone)), node_ranks=1, nics=1, nic_rate=link.rate, node_link=_loopback().rate,
        latency_s=link.latency_s,
    )  # fmt: skip
    for stage in range(4):
        if row := systems.get(f"stage{stage}"):
            estimate = _planned(shape, machine, stage, work["ranks"], work["batch"])
            yield Run(f"{name}, stage {stage}", source, estimate, row["median_s"])


def _planned(shape: Shape, machine: Hardware, stage: int, ranks: int, batch: int) -> Estimate:
    """As `shard(precision="fp32")` runs on a CPU, with AdamW."""
    return Estimate(
        work=Work(widths=widths_of("fp32", None), shape=shape, bucket_bytes=Zero.bucket_bytes), grid=grid_of(ranks),
        choice=Choice(stage, activations="keep"), hardware=machine, cost=named_cost("adamw"), batch=batch,
    )  # fmt: skip
