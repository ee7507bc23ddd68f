"""`onefold verify`: real steps on real processes, beside what was planned for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from onefold.cli.cuts import Trial
from onefold.cli.launch import is_rank, report_and_exit, run_ranks
from onefold.cli.lifeline import Lifeline
from onefold.cli.subject import Compute, TrialOptions
from onefold.cli.tables import console, print_table
from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of, init, mesh
from onefold.comm.meter import Flow, Label, Meter
from onefold.cost.text import format_bytes
from onefold.observe.rehearsal import Rehearsal
from onefold.observe.reports import MemoryReport, memory, traffic
from onefold.observe.simulation import states_elsewhere
from onefold.offload.files import check_folder
from onefold.settings.zero import Zero
from onefold.train.run.fits import on_host
from onefold.train.run.trial import TrialWork, try_steps

STATES, PEAK, EXACT = 0.02, 0.10, 0.0  # how far off a figure may be
TIMEOUT_S = 600.0
RESULTS = Label("verify", "what each rank found")


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
        trial = Trial.of(self, self.ranks, zero)
        with torch.device("meta"):
            trial.build()  # raises for a mistake in the model before ranks are started
        if self.offload_path is not None:
            check_folder(self.offload_path, 0)
        if not torch.cuda.device_count():  # else ranks use GPUs, of which this process is to load no driver
            self.tell_plan(self.precision, self.ranks, self.batch, on_host(self.ranks))
        rows = run_ranks(self.ranks, ["verify", *self.arguments()])
        self.show(rows)
        return verdict(rows)

    def _as_rank(self, zero: Zero) -> int:
        line = Lifeline(lambda: None)  # a signal ends the launcher at once, and this rank with it
        try:
            init()
            everyone = Comm(axes_of(None).everyone, torch.device("cpu"), TIMEOUT_S, Meter())
            rows = [check._asdict() | {"good": check.good} for check in self.measured(zero)]
            found = [json.loads(text) for text in everyone.exchange(json.dumps(rows).encode(), RESULTS)]
            if everyone.rank == 0:  # of a pipeline all stages, of each its first rank
                every = self.ranks // self.pp
                several = [(f", stage {at}" * (self.pp > 1), found[at * every]) for at in range(self.pp)]
                line.say({"result": [row | {"what": row["what"] + of} for of, rows in several for row in rows]})
        except Exception as error:
            report_and_exit(line, error)
        return 0

    def measured(self, zero: Zero) -> list[Check]:
        """What this rank was planned to hold and send, and what it does. Collective."""
        trial = Trial.of(self, self.ranks, zero)
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        grid = trial.grid
        places = mesh(shard=grid.shard, tp=grid.tp, pp=grid.pp) if grid.tp * grid.pp > 1 else None
        axes = axes_of(places)
        stage = axes.pp.rank
        work = TrialWork(
            build=partial(trial.build, stage), sample=trial.sample(self.batch), zero=trial.zero, shape=self.shape(),
            cut=trial.cut(stage, places), axes=axes, mesh=places, ranks=self.ranks, micro_batches=self.micro_batches,
            optimizer=self.optimizer, optimizer_state=self.optimizer_state,
        )  # fmt: skip
        result = try_steps(work, device)
        return compare(result.planned, result.model, result.peak_bytes, result.messages)

    def show(self, rows: list[dict[str, Any]]) -> None:
        if self.json:
            sys.stdout.write(json.dumps({"checks": rows, "good": all(row["good"] for row in rows)}, indent=1) + "\n")
            return
        tables: dict[str, list[list[Any]]] = {}  # of a pipeline one for each stage
        for row in rows:
            what, _, stage = row["what"].partition(", stage ")
            nbytes = "calls" not in row["what"]
            planned, measured = (format_bytes(row[k]) if nbytes else row[k] for k in ("planned", "measured"))
            off = abs(row["measured"] - row["planned"]) / max(row["planned"], 1)
            verdict = "[green]yes[/]" if row["good"] else "[red]no[/]"
            name = "  calls" if what.endswith(" calls") else what  # of the line above
            tables.setdefault(stage, []).append(
                [name, planned, measured, f"{off:.2%}", f"{row['tolerance']:.0%}", verdict]
            )
        cut = f", tp={self.tp}" * (self.tp > 1) + f", pp={self.pp}" * (self.pp > 1)
        for stage, body in tables.items():
            rank = f"the first rank of pipeline stage {stage}" if stage else "rank 0"
            title = f"{self.name} at stage {self.stage} on {self.ranks} ranks{cut}: {rank} in a steady step"
            print_table(console(), title, ("", "planned", "measured", "off by", "allowed", "ok"), body)


def compare(
    planned: Rehearsal,
    model: torch.nn.Module,
    peak: int,
    messages: Mapping[tuple[str, str], Flow] = MappingProxyType({}),
) -> list[Check]:
    """Every category of memory, every purpose of traffic and its calls; `messages` are those of tensor parallelism."""
    now, sent = memory(model), {**traffic(model).flows, **messages}
    wanted_flows = {**planned.sent, **planned.tensor_messages}
    checks = [
        Check("parameters", planned.states.parameters, now.parameters.measured, STATES),
        Check("gradients", planned.states.gradients, now.gradients.measured, STATES),
        Check("optimizer", planned.states.optimizer, now.optimizer.measured, STATES),
        Check("states", planned.states.total, now.states, STATES),
        Check("constant buffers", planned.communication, now.communication.measured, PEAK),
        Check("peak", planned.peak_bytes, peak, PEAK),
    ]
    checks += elsewhere(planned, now)
    for key in sorted(wanted_flows.keys() | sent.keys()):
        wanted, found = wanted_flows.get(key), sent.get(key)
        name = f"{key[0]} ({key[1]})"
        checks.append(Check(name, wanted.sent_bytes if wanted else 0, found.sent_bytes if found else 0, STATES))
        checks.append(Check(f"{name} calls", wanted.calls if wanted else 0, found.calls if found else 0, EXACT))
    return checks


def elsewhere(planned: Rehearsal, now: MemoryReport) -> Iterator[Check]:
    """Bytes of states on host and disk; between steps no gradient waits there. And of checkpointed block inputs."""
    for tier, plan in (("host", planned.host), ("disk", planned.disk)):
        held = states_elsewhere(now, disk=tier == "disk")
        for state in ("optimizer", "parameters"):
            wanted, found = getattr(plan, state), getattr(held, state)
            if found or wanted:
                yield Check(f"{state} on {tier}", wanted, found, STATES)
    for name, wanted, found in (
        ("block inputs", planned.checkpoints, now.checkpoints.measured),
        ("block inputs on host", planned.checkpoints_host, now.checkpoints_host.measured),
    ):
        if found or wanted:
            yield Check(name, wanted, found, STATES)


def verdict(rows: list[dict[str, Any]]) -> int:
    """The exit code: 0 if every figure is as planned, else 1."""
    return 0 if all(row["good"] for row in rows) else 1
