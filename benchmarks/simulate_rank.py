"""One rank of a cluster on one device: planned against measured memory, and the time of a step without a network.

python benchmarks/simulate_rank.py 128b:64 1t:1024      # MODEL:RANKS …, stage 3, bf16, one sequence of 1024 tokens
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from functools import partial
from pathlib import Path

import torch

from onefold.cost.shapes import named
from onefold.observe.simulation import Simulation, simulate
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero
from onefold.train.run.model import GPT, initialise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="MODEL:RANKS")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--master", choices=("fp32", "split"))
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again in backward")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for run in options.runs:
        model, ranks = run.split(":")
        rows.append(one(model, int(ranks), options))
        gc.collect()
        torch.cuda.empty_cache()
    print(
        f"{'':<14}{'planned states':>16}{'measured':>10}{'off':>9}{'planned peak':>14}{'measured':>10}{'off':>9}  steps"
    )
    for row in rows:
        planned, found = row["planned"], row["measured"]
        states = f"{planned['states'] / 1e9:>14.2f}GB{found['states'] / 1e9:>8.2f}GB{row['states_off']:>+9.2%}"
        peak = f"{planned['peak'] / 1e9:>12.2f}GB{found['peak'] / 1e9:>8.2f}GB{row['peak_off']:>+9.2%}"
        steps = ", ".join(f"{step:.2f} s" for step in row["steps_s"])
        if row["compute_s"] is not None:
            known = [name for name in ("compute", "launch", "stand_ins") if row[f"{name}_s"] is not None]
            parts = [f"{row[f'{name}_s']:.2f} s {name}" for name in known]
            steps += f": {', '.join(parts)}"
        steps += f" (planned in {row['plan_s']:.0f} s, built in {row['build_s']:.0f} s)"
        print(f"{row['model'] + '/' + str(row['ranks']):<14}{states}{peak}  {steps}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def one(model: str, ranks: int, options: argparse.Namespace) -> dict[str, object]:
    shape = named(model)
    if options.seq:
        shape = dataclasses.replace(shape, seq=options.seq)
    tokens = torch.zeros(options.batch, shape.seq, dtype=torch.long)
    narrow = options.precision != "fp32"
    zero = Zero(
        stage=options.stage,
        precision=Precision(compute=options.precision, master=options.master if narrow else None),
        activations="checkpoint" if options.checkpoint else "keep",
    )
    found = simulate(
        partial(GPT, shape), (tokens, tokens), zero, ranks=ranks, steps=options.steps,
        init=partial(initialise, layers=shape.layers),
    )  # fmt: skip
    return report(model, found)


def report(model: str, found: Simulation) -> dict[str, object]:
    return {
        "model": model, "ranks": found.ranks, "stage": found.stage, "device": found.device,
        "parameters": found.parameters, "torch": torch.__version__,
        "planned": {"states": found.planned.states.total, "peak": found.planned.peak_bytes, **found.planned.peak},
        "measured": {"states": found.states.total, "peak": found.peak_bytes, "reserved": found.reserved_bytes},
        "states_off": found.states_off, "peak_off": found.peak_off, "steps_s": found.steps_s,
        "compute_s": found.compute_s, "launch_s": found.launch_s,
        "stand_ins_s": found.busy.stand_ins_s if found.busy else None,
        "sent_bytes": found.sent_bytes, "plan_s": found.plan_s, "build_s": found.build_s,
    }  # fmt: skip


if __name__ == "__main__":
    main()
