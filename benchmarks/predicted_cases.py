"""The cases of docs/results/predicted.md: what was measured, and the plan of the same work on the same machine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.long_context import TILE
from benchmarks.predicted_cpu import cpu_runs, slower
from benchmarks.systems.table import SYSTEMS
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.families import FAMILIES
from onefold.cost.hardware import Hardware, hardware, recorded
from onefold.cost.rates import Rates, read_rates, shipped_rates
from onefold.cost.recomputed import Seen, choose_policy
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
PLANNED += ("onefold+clip-never", "onefold+muon")
LEAN = {"onefold+lean": "bf16", "onefold+lean8": "8bit"}  # optimizer state by system
LEAN_TILE = SYSTEMS["onefold+lean"].settings["tile"]
COMPUTING = ("products", "attention", "elementwise", "loss", "blocks", "sustained")  # what the device does
FREE = 1e18  # bytes per second of a network that costs nothing


class Case(NamedTuple):
    """One run, and its plan."""

    name: str
    source: str
    estimate: Estimate
    step_s: float
    peak_bytes: int | None
    apart: str = ""  # why its time does not count, and is only shown


def h200() -> Hardware:
    """The machine that the cases ran on; as in the hardware table until it is recorded."""
    rates = shipped_rates("h200")
    return hardware("h200") if rates is None else recorded(rates)


def half_of(rates: Rates, pair: Rates, hidden: int) -> Hardware:
    """The GPU as one of two ranks has it that share it: it computes and updates so much slower as blocks and updates
    were measured to be while the other rank does the same, and slower again while messages are in flight. Messages
    take what those of a block's unit took between the two: alone, while both compute, and while one of the other kind
    is in flight."""
    blocks = {row[1]: row[3] / row[2] for row in pair.record["shared"]["blocks"]}
    updates = [row[2] / row[1] for row in pair.record["shared"]["updates"]]
    nearest = min(blocks, key=lambda found: abs(math.log(found / hidden)))
    messages = pair.record["shared"]["messages"]
    of_unit = min(messages, key=lambda row: abs(math.log(row[0] / (24 * hidden**2))))
    nbytes, gather_s, reduce_s, both_s, gather_busy_s, reduce_busy_s, block_s, slowed_s = of_unit
    link = pair.link_rate()
    assert link is not None
    rate = nbytes / 2 / (gather_s - link.latency_s)  # of messages of this size: much larger ones may be slower
    return dataclasses.replace(
        recorded(slower(slower(rates, blocks[nearest], COMPUTING), updates[0], ("updates",))),
        node_ranks=1, nics=1, nic_rate=rate, node_link=rate, latency_s=link.latency_s,
        beside_compute=(gather_busy_s / gather_s, reduce_busy_s / gather_s),
        both_at_once=max(1.0, both_s / max(gather_s, reduce_s)), slowed_by_messages=max(1.0, slowed_s / block_s),
    )  # fmt: skip


def machines() -> list[str]:
    """The records that the plans were made with, in a line each."""
    rates = shipped_rates("h200")
    found = [(rates.record, "src/onefold/cost/devices/h200.json")] if rates else []
    found += [(read_rates(PAIR).record, PAIR.relative_to(ROOT).as_posix())] if PAIR.exists() else []
    found += [
        (read_rates(path).record, path.relative_to(ROOT).as_posix()) for path in sorted(RESULTS.glob("rates-*.json"))
    ]
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


def cases() -> list[Case]:
    """Every measured run of ours on a machine that was recorded."""
    files = [*sorted(RESULTS.glob("gpu-*.json")), DOCS / "clipping-2.78b-h200.json"]
    files += [*sorted(DOCS.glob("nccl-*-h200.json")), *sorted(DOCS.glob("rank*-h200.json"))]
    found = [case for path in files for case in of_systems(path)]
    on_cpus = [Case(*run, None) for run in cpu_runs()]
    return [*found, *simulated(), *recomputed(), *of_transformers(), *lean(), *long_contexts(), *on_cpus]


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
    machine, rates, apart = h200(), shipped_rates("h200"), ""
    if work["ranks"] > 1:
        if rates is None or not PAIR.exists():
            return
        pair = read_rates(PAIR)
        machine, apart = half_of(rates, pair, work["dim"]), on_another_day(result, pair)
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
                reshard_after_forward=name != "onefold+keep", optimizer="muon" if "muon" in name else "adamw",
            )  # fmt: skip
            yield Case(f"{work['name']}, {name}", path.name, estimate, row["median_s"], row["peak_device_bytes"], apart)


def on_another_day(result: dict[str, Any], pair: Rates) -> str:
    """Why a run of two ranks does not count beside this record of their links: messages over loopback depend on the
    host of the day. Empty if both are of one day and one kind of machine."""
    ran, recorded_on = result["date"][:10], pair.record["date"][:10]
    hosts = [(one["machine"]["cpu"], one["machine"]["cores"]) for one in (result, pair.record)]
    alike = hosts[0] == hosts[1] and result["machine"]["gpu"] == pair.device
    return "" if alike and ran == recorded_on else f"{ran}, links recorded {recorded_on}"


def planned(
    shape: Shape, machine: Hardware, choice: Choice, ranks: int, batch: int, *, in_backward: bool = False,
    reshard_after_forward: bool = True, bucket_bytes: int = Zero.bucket_bytes, micro_batches: int = 1,
    compiled: bool = False, state: str = "fp32", sums_width: int = 4, tile: int | None = None, tiled_mlps: bool = True,
    optimizer: str = "adamw",
) -> Estimate:  # fmt: skip
    """As `shard(precision="bf16")` runs on a GPU."""
    widths = widths_of("bf16", "split")
    if micro_batches > 1:
        widths = widths._replace(grad=sums_width)
    return Estimate(
        work=Work(
            widths=widths, shape=shape, bucket_bytes=bucket_bytes, tile=tile, tiled_mlps=tiled_mlps, auto_wire=True
        ),
        choice=choice, grid=grid_of(ranks), hardware=machine, cost=named_cost(optimizer, state), batch=batch,
        in_backward=in_backward, reshard_after_forward=reshard_after_forward, micro_batches=micro_batches,
        compiled=compiled,
    )  # fmt: skip


def simulated() -> Iterator[Case]:
    """One rank of many by `benchmarks/simulate_rank.py`, without the seconds of the copies that stand for messages."""
    machine = free(h200())
    for path, policy in ((DOCS / "simulate-128b-64.json", "keep"), (DOCS / "simulate-1t-1024.json", "checkpoint")):
        for row in json.loads(path.read_text()):
            estimate = planned(named(row["model"]), machine, Choice(row["stage"], activations=policy), row["ranks"], 1)
            name, step_s = f"{row['model']}, one rank of {row['ranks']}", row["steps_s"][-1] - row["stand_ins_s"]
            yield Case(name, path.name, estimate, step_s, row["measured"]["peak"])


# Runs of transformers' Qwen2 by Onefold 0.1 on one H200, torch 2.11, of which no file was kept: sequences of 1024
# tokens, 4 micro-batches, AdamW, bf16.
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
        choice = Choice(3, optimizer=tier, activations=policy)
        estimate = planned(shape, h200(), choice, 1, batch, micro_batches=4, compiled=how == "compiled")
        where = ", optimizer on the host" if tier == "host" else ""
        step_s = 4 * batch * shape.seq / tokens_per_s
        yield Case(f"{name}, {how}{where}", "predicted_cases.py", estimate, step_s, peak and int(peak))


def lean() -> Iterator[Case]:
    """Fine-tuning of Qwen2.5's shapes in plain PyTorch, compiled, with moments and sums in few bits, the loss by tiles
    and activations="auto"; of every file in docs/results but those of runs that chose where states lie. The compiler
    decides what a compiled block keeps, which the planner does not know: so peaks are not compared."""
    for path in sorted(DOCS.glob("qwen2.5-*-h200.json")):
        found = json.loads(path.read_text())
        work, systems = found["work"], found["systems"]
        for name, state in LEAN.items():
            row = systems.get(name)
            if row is None or row["error"] is not None or work.get("away"):
                continue
            shape = dataclasses.replace(FAMILIES[f"qwen2.5-{work['decoder']}"], seq=work["seq"])
            kept = planned(
                shape, h200(), Choice(3, activations="keep"), 1, work["batch"], compiled=True, state=state,
                micro_batches=work["micro_batches"], sums_width=2, tile=LEAN_TILE, tiled_mlps=False,
            )  # fmt: skip
            tokens = work["batch"] * work["micro_batches"] * work["seq"]
            label = f"qwen2.5-{work['decoder']}, {name.removeprefix('onefold+')}, {tokens:,} tokens a step"
            yield Case(label, path.name, with_automatic_activations(kept), row["median_s"], None)


def with_automatic_activations(estimate: Estimate) -> Estimate:
    """As many blocks recomputed as activations="auto" decides by what the planner counts for one, on one rank."""
    shape, choice, machine = estimate.work.shape, estimate.choice, estimate.hardware
    assert shape is not None
    states = Work(widths=estimate.work.widths, numel=shape.numel, bucket_bytes=estimate.work.bucket_bytes)
    alone = Estimate(
        work=states, choice=choice, grid=estimate.grid, hardware=machine, cost=estimate.cost,
        micro_batches=estimate.micro_batches,
    )  # fmt: skip
    kept = estimate.work.activations(estimate.batch, "keep", estimate.grid).kept_per_block
    inputs = estimate.batch * shape.seq * shape.hidden * estimate.work.widths.compute
    found = choose_policy(Seen(kept, inputs, max(0, machine.usable_bytes - alone.peak_bytes)), shape.layers, 1)
    if found.policy == "keep":
        return estimate
    return dataclasses.replace(estimate, choice=choice._replace(activations=found.policy), recomputed=found.recomputed)


def long_contexts() -> Iterator[Case]:
    """Long sequences of `benchmarks/long_context.py` on one GPU, the last of three steps."""
    for path in (DOCS / "long-context-1.5b-h200.json", DOCS / "long-context-7b-h200.json"):
        for row in (row for row in json.loads(path.read_text()) if "ended" not in row):
            shape = dataclasses.replace(FAMILIES[f"qwen2.5-{row['model']}"], seq=row["tokens"])
            choice = Choice(3, optimizer=row["offload"] or "device", activations="checkpoint+host")
            estimate = planned(shape, h200(), choice, 1, 1, state=row["state"], tile=TILE)
            name = f"qwen2.5-{row['model']}, one sequence of {row['tokens']:,} tokens"
            yield Case(name, path.name, estimate, row["steps_s"][-1], row["peak_bytes"])


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
