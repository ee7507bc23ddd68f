"""`onefold simulate`: one rank of many on this machine, with real memory and compute, and no peers."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from onefold.cli.cuts import Trial
from onefold.cli.subject import Compute, TrialOptions
from onefold.cli.tables import console, print_table, seconds
from onefold.cost.machine import here
from onefold.cost.text import format_bytes
from onefold.errors import ConfigError
from onefold.observe.simulation import Simulation, simulate
from onefold.train.run.fits import on_host
from onefold.train.run.model import initialise


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(TrialOptions):
    """One rank of many, with real memory and compute and no peers. Try: onefold simulate --model gpt-tiny --ranks 64"""

    ranks: int = 8
    """Number of ranks to simulate."""

    batch: int = 1
    """Sequences per rank."""

    steps: int = 2
    """Steps to take; the first one is slower."""

    precision: Compute = "bf16"
    """The dtype of forward and backward."""

    pp_stage: int = 0
    """With --pp: the pipeline stage to simulate, from 0 on."""

    device: Literal["cpu", "cuda"] | None = None
    """By default cuda if there is a GPU, else cpu."""

    backend: Literal["gloo", "nccl"] | None = None
    """What would move messages; nccl for cuda and gloo for cpu if left out. With nccl no call is made per peer."""

    def run(self) -> int:
        zero = self.zero(self.precision, "ranks", "batch", "steps")
        trial, shape = Trial.of(self, self.ranks, zero), self.shape()
        if not 0 <= self.pp_stage < self.pp:
            raise ConfigError(f"--pp-stage {self.pp_stage} is not one of the {self.pp} stages 0 to {self.pp - 1}")
        with torch.device("meta"):
            trial.build(self.pp_stage)  # raises for a mistake in the model before anything is planned for it
        machine = here(torch.device("cuda")) if self.device != "cpu" and torch.cuda.is_available() else on_host(1)
        self.tell_plan(self.precision, self.ranks, self.batch, machine)
        found = simulate(
            partial(trial.build, self.pp_stage), trial.sample(self.batch), trial.zero, ranks=trial.grid.shard,
            steps=self.steps, device=self.device,
            init=partial(initialise, layers=shape.layers) if shape else None, optimizer=self.optimizer,
            optimizer_state=self.optimizer_state, backend=self.backend, micro_batches=self.micro_batches,
            cut=trial.cut(self.pp_stage), split=trial.split,
        )  # fmt: skip
        if self.json:
            sys.stdout.write(json.dumps(as_dict(found), indent=1) + "\n")
        else:
            show(self.name, found)
        return 0


def as_dict(found: Simulation) -> dict[str, object]:
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    plan, cut = found.planned, fields.pop("cut")
    fields |= {"tp": cut.tp, "pp": cut.pp, "pp_stage": cut.stage}
    for tier, wanted in (("host", plan.host), ("disk", plan.disk)):
        fields[tier] = {"planned": wanted._replace(gradients=0)._asdict(), "measured": fields[tier]._asdict()}
    fields["planned"] = {"states_bytes": plan.states.total, "peak_bytes": plan.peak_bytes, **plan.states._asdict()}
    fields["states"] = {"states_bytes": found.states.total, **found.states._asdict()}
    busy = fields.pop("busy") or (None, None)
    fields |= {"compute_s": busy[0], "launch_s": found.launch_s, "stand_ins_s": busy[1]}
    return fields | {"states_off": found.states_off, "peak_off": found.peak_off}


def show(name: str, found: Simulation) -> None:
    plan = found.planned
    rows = [
        [what, format_bytes(getattr(plan.states, what)), format_bytes(getattr(found.states, what))]
        for what in ("parameters", "gradients", "optimizer")
    ]
    totals = (
        ("states", plan.states.total, found.states.total, found.states_off),
        ("peak", plan.peak_bytes, found.peak_bytes, found.peak_off),
    )
    rows += [[what, format_bytes(wanted), format_bytes(seen), f"{off:+.2%}"] for what, wanted, seen, off in totals]
    for tier, wanted, seen in (("host", plan.host, found.host), ("disk", plan.disk, found.disk)):
        for state in ("optimizer", "parameters"):
            planned, measured = getattr(wanted, state), getattr(seen, state)
            if planned or measured:
                rows.append([f"{state} on {tier}", format_bytes(planned), format_bytes(measured)])
    if found.reserved_bytes:
        rows.append(["reserved by the allocator", "", format_bytes(found.reserved_bytes)])
    cut = found.cut
    of = f", tp={cut.tp}" * (cut.tp > 1) + f", pipeline stage {cut.stage} of {cut.pp}" * (cut.pp > 1)
    title = (
        f"{name} ({found.parameters:,} parameters): a rank of {found.ranks} at stage {found.stage}{of}, {found.device}"
    )
    screen = console()
    heads = ("per rank", "planned", "measured", "off by")
    print_table(screen, title, heads, [row + [""] * (4 - len(row)) for row in rows])
    took = ", ".join(seconds(step) for step in found.steps_s)
    screen.print(f"start: {seconds(found.build_s)}; steps: {took}; would send {format_bytes(found.sent_bytes)}")
    if found.busy is None:
        screen.print("the share of compute is unknown: torch's profiler saw no kernels on this device")
        return
    parts = [f"compute {seconds(found.busy.compute_s)}"]
    if found.launch_s is not None:
        parts.append(f"launch overhead {seconds(found.launch_s) or 'none'}")
    if found.busy.stand_ins_s:
        parts.append(f"copies that stand for messages {seconds(found.busy.stand_ins_s)}")
    line = f"the last step: {', '.join(parts)}"
    if found.launch_s is None:
        line += "; with the profiler on this is more than the step took, so launch overhead is unknown"
    screen.print(line)
