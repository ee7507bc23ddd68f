"""`onefold verify`: real steps on real processes, beside what was planned for them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onefold.cli.launch import is_rank, report_and_exit, run_ranks
from onefold.cli.lifeline import Lifeline
from onefold.cli.subject import Compute, TrialOptions
from onefold.cli.tables import console, print_table
from onefold.comm.mesh import init
from onefold.cost.text import format_bytes
from onefold.observe.inventory import DISK
from onefold.observe.rehearsal import Rehearsal, rehearse
from onefold.observe.reports import MemoryReport, memory, traffic
from onefold.observe.simulation import train_step
from onefold.offload.files import check_folder
from onefold.optim.named import choose
from onefold.settings.zero import Zero
from onefold.sharding import shard
from onefold.train.run.fits import on_host

STATES, PEAK, EXACT = 0.02, 0.10, 0.0  # how far off a figure may be
WARM_UP = 2  # steps until buffers are allocated and schedules learnt


class Check(NamedTuple):
    """One figure, planned and measured."""

    what: str
    planned: int
    measured: int
    tolerance: float

    @property
    def off(self) -> float:
        return abs(self.measured - self.planned) / max(self.planned, 1)

    @property
    def good(self) -> bool:
        return self.off <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(TrialOptions):
    """Run two real steps and compare memory, traffic and calls with the plan; exit code 1 if the plan was wrong."""

    ranks: int = 2
    """Local ranks (processes)."""

    batch: int = 2
    """Sequences per rank."""

    precision: Compute = "fp32"
    """The dtype of forward and backward."""

    def run(self) -> int:
        zero = self.zero(self.precision, "ranks", "batch")
        if is_rank():
            return self._as_rank(zero)
        with torch.device("meta"):
            self.build()  # raises for a mistake in the model before ranks are started
        if self.offload_path is not None:
            check_folder(self.offload_path, 0)
        if not torch.cuda.device_count():  # else ranks use GPUs, of which this process is to load no driver
            self.tell_plan(self.precision, self.ranks, self.batch, "keep", on_host(self.ranks))
        rows = run_ranks(self.ranks, ["verify", *self.arguments()])
        self._show(rows)
        return verdict(rows)

    def _as_rank(self, zero: Zero) -> int:
        line = Lifeline(lambda: None)  # a signal ends the launcher at once, and this rank with it
        try:
            checks = [check._asdict() | {"good": check.good} for check in self._measure(zero)]
            if os.environ["RANK"] == "0":
                line.say({"result": checks})
        except Exception as error:
            report_and_exit(line, error)
        return 0

    def _measure(self, zero: Zero) -> list[Check]:
        init()
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        backend = "nccl" if device.type == "cuda" else "gloo"
        sample = self.sample(self.batch)
        with torch.device("meta"):
            blank = self.build()
        chosen = choose(self.optimizer, state=self.optimizer_state)
        planned = rehearse(
            blank, sample, zero, chosen.cost, ranks=self.ranks, plays=backend, node_ranks=self.ranks,
            optimizer=chosen.make_whole,
        )  # fmt: skip
        model = shard(self.build().to(device), zero)
        optimizer = chosen.make(model)
        inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)
        peak = 0
        for step in range(WARM_UP + 1):
            if device.type == "cuda" and step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            peak = train_step(model, optimizer, inputs)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        return compare(planned, model, peak)

    def _show(self, rows: list[dict[str, Any]]) -> None:
        if self.json:
            sys.stdout.write(json.dumps({"checks": rows, "good": all(row["good"] for row in rows)}, indent=1) + "\n")
            return
        body = []
        for row in rows:
            nbytes = "calls" not in row["what"]
            planned, measured = (format_bytes(row[k]) if nbytes else row[k] for k in ("planned", "measured"))
            off = abs(row["measured"] - row["planned"]) / max(row["planned"], 1)
            verdict = "[green]yes[/]" if row["good"] else "[red]no[/]"
            body.append([row["what"], planned, measured, f"{off:.2%}", f"{row['tolerance']:.0%}", verdict])
        title = f"{self.name} at stage {self.stage} on {self.ranks} ranks: rank 0 in a steady step"
        print_table(console(), title, ("", "planned", "measured", "off by", "allowed", "good"), body)


def compare(planned: Rehearsal, model: torch.nn.Module, peak: int) -> list[Check]:
    """Every category of memory, every purpose of traffic and its calls."""
    now, sent = memory(model), traffic(model).flows
    checks = [
        Check("parameters", planned.states.parameters, now.parameters.measured, STATES),
        Check("gradients", planned.states.gradients, now.gradients.measured, STATES),
        Check("optimizer", planned.states.optimizer, now.optimizer.measured, STATES),
        Check("states", planned.states.total, now.states, STATES),
        Check("constant buffers", planned.communication, now.communication.measured, PEAK),
        Check("peak", planned.peak_bytes, peak, PEAK),
    ]
    checks += elsewhere(planned, now)
    for key in sorted(planned.sent.keys() | sent.keys()):
        wanted, found = planned.sent.get(key), sent.get(key)
        name = f"{key[0]} ({key[1]})"
        checks.append(Check(name, wanted.sent_bytes if wanted else 0, found.sent_bytes if found else 0, STATES))
        checks.append(Check(f"{name} calls", wanted.calls if wanted else 0, found.calls if found else 0, EXACT))
    return checks


def elsewhere(planned: Rehearsal, now: MemoryReport) -> Iterator[Check]:
    """Bytes of states on host and disk; between steps no gradient waits there."""
    for tier, plan in (("host", planned.host), ("disk", planned.disk)):
        rows = [row for row in now.elsewhere if (row.place == DISK) == (tier == "disk")]
        for state, wanted in (("optimizer", plan.optimizer), ("parameters", plan.parameters)):
            found = sum(row.measured for row in rows if row.state == state)
            if found or wanted:
                yield Check(f"{state} on {tier}", wanted, found, STATES)


def verdict(rows: list[dict[str, Any]]) -> int:
    """The exit code: 0 if every figure is as planned, else 1."""
    return 0 if all(row["good"] for row in rows) else 1
