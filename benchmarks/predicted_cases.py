"""The cases of docs/results/predicted.md: what was measured, and the plan of the same work on the same machine."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.families import FAMILIES
from onefold.cost.hardware import Hardware, hardware, recorded
from onefold.cost.rates import Rates, read_rates, shipped_rates
from onefold.cost.shapes import Shape, named
from onefold.cost.states import named_cost
from onefold.cost.work import Work, grid_of
from onefold.settings.widths import widths_of
from onefold.settings.zero import Zero

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs/results"
PAIR = RESULTS / "links-nccl-pair-nvidia-h200.json"
STAGES = {"stage0": 0, "stage1": 1, "stage2": 2}  # of systems; others are stage 3
PLANNED = ("stage0", "stage1", "stage2", "stage3", "onefold", "onefold+keep", "onefold+inside", "onefold+clip")
DEVICE_PARTS = ("products", "attention", "elementwise", "loss", "blocks", "sustained", "updates")
FREE = 1e18  # bytes per second of a network that costs nothing


class Case(NamedTuple):
    """One run, and its plan."""

    name: str
    source: str
    estimate: Estimate
    step_s: float
    peak_bytes: int | None


def h200(ranks: int = 1) -> Hardware:
    """The machine that the cases ran on, shared by so many ranks; as in the hardware table until it is recorded."""
    rates = shipped_rates("h200")
    if rates is None:
        row = hardware("h200")
        return dataclasses.replace(row, efficiency=row.efficiency / ranks, memory_rate=row.memory_rate / ranks)
    return recorded(shared(rates, ranks) if ranks > 1 else rates)


def machines() -> list[str]:
    """The records that the plans were made with, in a line each."""
    rates = shipped_rates("h200")
    found = [(rates.record, "src/onefold/cost/devices/h200.json")] if rates else []
    found += [(read_rates(PAIR).record, PAIR.relative_to(ROOT).as_posix())] if PAIR.exists() else []
    lines = [
        f"{r['device']}, torch {r['versions']['torch']}, {r['date']}: `{r['command']}` ({path})" for r, path in found
    ]
    if rates is not None and not rates.sustained("bf16"):
        lines.append("blocks that run for seconds without a pause have no record yet: all seconds are of short timings")
    if rates is None:
        lines.append("the H200 has no record yet: its cases are planned with the hardware table's one efficiency")
    if not PAIR.exists():
        lines.append("the links of two NCCL ranks on one GPU have no record yet: their cases are left out")
    return lines


def shared(rates: Rates, ranks: int) -> Rates:
    """A device that so many ranks compute on at once: each gets its share."""
    record: dict[str, Any] = dict(copy.deepcopy(rates.record))
    for part in DEVICE_PARTS:
        record[part] = {key: _slower(part, rows, ranks) for key, rows in record.get(part, {}).items() if key != "host"}
    return Rates(record)


def _slower(part: str, rows: Any, ranks: int) -> Any:
    """Rows whose seconds are multiplied."""
    if isinstance(rows, dict):
        return {key: _slower(part, more, ranks) for key, more in rows.items()}
    first = {"products": 3, "attention": 3, "elementwise": 1, "loss": 2, "blocks": 4, "updates": 2}[part]
    return [[*row[:first], *(seconds * ranks for seconds in row[first:])] for row in rows]


def cases() -> list[Case]:
    """Every measured run of ours on a machine that was recorded."""
    found = [case for path in sorted(RESULTS.glob("gpu-*.json")) for case in of_systems(path)]
    return [*found, *simulated(), *recomputed(), *of_transformers()]


def free(machine: Hardware) -> Hardware:
    """One rank of many whose peers are not there: messages cost nothing."""
    return dataclasses.replace(machine, node_link=FREE, nic_rate=FREE, latency_s=0.0, node_ranks=8)


def of_systems(path: Path) -> Iterator[Case]:
    """The systems of ours in a result of `python -m benchmarks.gpu`."""
    result = json.loads(path.read_text())
    work = result["work"]
    shape = Shape(
        layers=work["layers"], hidden=work["dim"], heads=max(1, work["dim"] // 64), seq=work["seq"],
        vocab=work["vocab"], tied=False,
    )  # fmt: skip
    machine = h200(work["ranks"])
    if work["ranks"] > 1:
        if not PAIR.exists():
            return
        pair = read_rates(PAIR).link_rate()
        assert pair is not None
        machine = dataclasses.replace(
            machine, node_ranks=1, nics=1, nic_rate=pair.rate, node_link=pair.rate, latency_s=pair.latency_s
        )
    elif work["rank_of"] > 1:
        machine = free(machine)
    away = work.get("away") or {}
    for name, row in result["systems"].items():
        if name in PLANNED and row["error"] is None:
            choice = Choice(
                STAGES.get(name, 3), optimizer=away.get("optimizer", "device"),
                activations="checkpoint" if work["recompute"] else "keep",
            )  # fmt: skip
            estimate = planned(
                shape, machine, choice, work["ranks"] * work["rank_of"], work["batch"], in_backward="inside" in name,
                reshard_after_forward=name != "onefold+keep",
            )  # fmt: skip
            yield Case(f"{work['name']}, {name}", path.name, estimate, row["median_s"], row["peak_device_bytes"])


def planned(
    shape: Shape, machine: Hardware, choice: Choice, ranks: int, batch: int, *, in_backward: bool = False,
    reshard_after_forward: bool = True, bucket_bytes: int = Zero.bucket_bytes, micro_batches: int = 1,
) -> Estimate:  # fmt: skip
    """As `shard(precision="bf16")` runs on a GPU, with AdamW."""
    widths = widths_of("bf16", "split")
    if micro_batches > 1:
        widths = widths._replace(grad=4)
    return Estimate(
        work=Work(widths=widths, shape=shape, bucket_bytes=bucket_bytes, auto_wire=True), choice=choice,
        grid=grid_of(ranks), hardware=machine, cost=named_cost("adamw"), batch=batch, in_backward=in_backward,
        reshard_after_forward=reshard_after_forward, micro_batches=micro_batches,
    )  # fmt: skip


def simulated() -> Iterator[Case]:
    """One rank of many by `benchmarks/simulate_rank.py`, whose messages are copies on the device."""
    machine = h200()
    rate = machine.memory_rate / 2  # bytes written per second
    machine = dataclasses.replace(machine, node_link=rate, nic_rate=rate, latency_s=0.0, node_ranks=8)
    for path, policy in ((DOCS / "simulate-128b-64.json", "keep"), (DOCS / "simulate-1t-1024.json", "checkpoint")):
        for row in json.loads(path.read_text()):
            choice = Choice(row["stage"], activations=policy)
            estimate = planned(named(row["model"]), machine, choice, row["ranks"], 1)
            name = f"{row['model']}, one rank of {row['ranks']}"
            yield Case(name, path.name, estimate, row["steps_s"][-1], row["measured"]["peak"])


# Runs of transformers' Qwen2 by Onefold 0.1 on one H200, torch 2.11, of which no file was kept: sequences of 1024
# tokens, 4 micro-batches, AdamW, bf16. The planner counts fused norms, as compiled blocks have them.
WITHOUT_FILES: tuple[tuple[str, str, int, str, str, float, float | None], ...] = (
    ("qwen2.5-1.5b", "compiled", 16, "keep", "device", 52.6e3, None),
    ("qwen2.5-1.5b", "eager", 16, "keep", "device", 41.4e3, None),
    ("qwen2.5-7b", "eager", 8, "checkpoint", "device", 9.4e3, 129 * 2**30),
    ("qwen2.5-7b", "eager, clipped", 16, "checkpoint", "host", 7.7e3, 76 * 2**30),
)


def of_transformers() -> Iterator[Case]:
    """Those runs, whose tokens per second are known."""
    for name, how, batch, policy, tier, tokens_per_s, peak in WITHOUT_FILES:
        shape = dataclasses.replace(FAMILIES[name], seq=1024)
        estimate = planned(shape, h200(), Choice(3, optimizer=tier, activations=policy), 1, batch, micro_batches=4)
        where = ", optimizer on the host" if tier == "host" else ""
        step_s = 4 * batch * shape.seq / tokens_per_s
        yield Case(f"{name}, {how}{where}", "predicted_cases.py", estimate, step_s, peak and int(peak))


def recomputed() -> Iterator[Case]:
    """One process of `benchmarks/activations.py`."""
    path = DOCS / "activations-h200.json"
    found = json.loads(path.read_text())["one"]
    shape = Shape(layers=48, hidden=2048, heads=16, seq=1024, vocab=8192)
    assert str(shape).startswith(found["shape"][:-1])
    for row in found["rows"]:
        choice = Choice(2, activations=row["policy"])
        estimate = planned(shape, h200(), choice, 1, found["batch"])
        yield Case(f"2.4b, {row['policy']}", path.name, estimate, row["step_s"], row["peak_bytes"])
