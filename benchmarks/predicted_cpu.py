"""The CPU cases of docs/results/predicted.md: two ranks, over links of a given rate and over the loopback device.

Other programs may use the CPU too, so the runs also time compute alone, in which each rank trains a model of its own.
The recorded seconds of the CPU are multiplied by the measured over the planned time of that. Links are as they were
measured in the run before its steps, and so is the CPU time that messages take from compute. Runs that are older than
that measurement have the rate of their fastest link for it: `tc` would have let that one send twice as much, so the
cores were its limit. So a plan is told how fast the CPU and the link were, and nothing of the stages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """All of machines that were recorded."""
    for path in sorted(RESULTS.glob("shaped-links-*.json")):
        machine = path.name.removeprefix("shaped-links-")
        if not (RESULTS / f"rates-{machine}").exists():
            continue
        found, rates = json.loads(path.read_text()), read_rates(RESULTS / f"rates-{machine}")
        fastest = max((Rates({"links": over["links"]}).link_rate() for over in found["over"]), key=_rate)
        for over in found["over"]:
            work, links = over.get("work") or found["work"], Rates({"links": over["links"]})
            name = f"2 CPU ranks, {rates.device}, {_where(over)}"
            yield from _stages(name, path.name, work, over["systems"], rates, links, fastest)
    rates, loopback = read_rates(RECORD), _loopback()
    for path in sorted(RESULTS.glob(f"cpu-*-{MACHINE}.json")):
        found = json.loads(path.read_text())
        name = f"2 CPU ranks, {rates.device}, loopback, {found['work']['name']}"
        yield from _stages(name, path.name, found["work"], found["systems"], rates, loopback, loopback.link_rate())


def _where(over: Mapping[str, Any]) -> str:
    return f"{over['mbit_per_s']:,} Mbit/s" if over["mbit_per_s"] else f"loopback, {over['work']['name']}"


def core_costs() -> list[str]:
    """The CPU time of a byte that a rank sends, by link, where a run measured it."""
    found = []
    for path in sorted(RESULTS.glob("shaped-links-*.json")):
        result = json.loads(path.read_text())
        rows = [(_where(over), Rates({"links": over["links"]}).cores) for over in result["over"]]
        costs = [f"{where} {1e9 / cores.rate:.2g} ns" for where, cores in rows if cores]
        found += [f"{result['machine']['cpu']}: {'; '.join(costs)}"] if costs else []
    return found


def _rate(link: Link | None) -> float:
    return link.rate if link else 0.0


def _loopback() -> Rates:
    """Of gloo on this machine's loopback device, between units of the default size."""
    rows = [[one["unit_bytes"], one["unit_bytes"] / 2 / one["gather_bytes_per_s"]] for one in _swept()]
    return Rates({"links": {"ranks": 2, "all_gather": rows}})


def _swept() -> Sequence[Mapping[str, float]]:
    found: Sequence[Mapping[str, float]] = json.loads(LOOPBACK.read_text())["alone"]
    return found


def _stages(
    name: str, source: str, work: Mapping[str, Any], systems: Mapping[str, Any], rates: Rates, links: Rates,
    fastest: Link | None,
) -> Iterator[Run]:  # fmt: skip
    shape = Shape(
        layers=work["layers"], hidden=work["dim"], heads=max(1, work["dim"] // 64), seq=work["seq"],
        vocab=work["vocab"], tied=False,
    )  # fmt: skip
    link, cores = links.link_rate(), links.cores
    assert link is not None and fastest is not None
    alone = systems[ALONE]["median_s"] / _planned(shape, recorded(rates), 0, 1, work["batch"]).step_s
    core_rate, core_latency_s = (cores.rate / alone, cores.latency_s * alone) if cores else (fastest.rate, 0.0)
    machine = dataclasses.replace(
        recorded(slower(rates, alone)), node_ranks=1, nics=1, nic_rate=link.rate, node_link=link.rate,
        latency_s=link.latency_s, core_rate=core_rate, core_latency_s=core_latency_s,
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
