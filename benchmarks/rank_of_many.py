"""What one rank's host takes to start and for a step, as the number of ranks grows: it should not grow.

A toy of 200 units of 10 parameters trains as rank 0 of 8, 64, 512 and 4096 ranks whose peers are not there, as if over
NCCL: messages cost nothing, so what is left is Python, hooks and calls of torch, and kernels whose sizes do not depend
on the number of ranks (a unit has 64 elements for each of 4096 ranks, so no layout is padded). All numbers of ranks are
in one process and take turns, so that drift of the machine hits all alike; CPU time counts; the best of all turns.

    python -m benchmarks.rank_of_many                            # stages 1 to 3, clipped
    python -m benchmarks.rank_of_many --stages 3 --rounds 5
    python -m benchmarks.rank_of_many --out benchmarks/results   # and write the file
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from benchmarks.measure import at_least
from benchmarks.results import file_of, machine, shown_command, versions, write
from onefold.comm.mesh import simulated_axes
from onefold.sharding import shard_over

RANKS = (8, 64, 512, 4096)
UNITS, PARAMETERS = 200, 10  # of the model, and of each unit
ALIGN = 64  # elements: a shard is a multiple of it
WARM_UP = 3  # steps: orders are learnt, buffers are made


class Row(nn.Module):
    """A few vectors, which are added up."""

    def __init__(self, parameters: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elements) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight
        return x


class Toy(nn.Module):
    """Units of equal size, each a module of its own."""

    def __init__(self, units: int = UNITS, parameters: int = PARAMETERS, elements: int = ALIGN) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Row(parameters, elements) for _ in range(units))
        self.elements = elements

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = row(x)
        return x.sum()


class Rank:
    """Rank 0 of many, without peers."""

    def __init__(self, ranks: int, stage: int, model: Toy) -> None:
        self.model, self._x = model, torch.zeros(model.elements)
        fields: dict[str, Any] = {"stage": stage, "units": Row, "bucket_bytes": 1 << 30}
        shard_over(simulated_axes(ranks, plays="nccl"), self.model, None, fields)
        self._optimizer = onefold.Optimizer(self.model, torch.optim.SGD, lr=1e-3)

    def step(self) -> None:
        self.model(self._x).backward()
        self._optimizer.clip_grad_norm(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(stage: int, numbers: list[int], build: Callable[[], Toy], rounds: int) -> dict[int, dict[str, float]]:
    """The least CPU seconds of a start and of a step, for each number of ranks."""
    best = {ranks: {"start_s": float("inf"), "step_s": float("inf")} for ranks in numbers}
    found: dict[int, Rank] = {}
    for turn in range(rounds):
        for ranks in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            found.pop(ranks, None)
            model = build()
            gc.collect()
            gc.disable()
            began = time.process_time()
            found[ranks] = Rank(ranks, stage, model)
            best[ranks]["start_s"] = min(best[ranks]["start_s"], time.process_time() - began)
            for _ in range(WARM_UP):
                found[ranks].step()
            gc.enable()
    for turn in range(4 * rounds):
        for ranks in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            gc.collect()
            gc.disable()
            began = time.process_time()
            found[ranks].step()
            best[ranks]["step_s"] = min(best[ranks]["step_s"], time.process_time() - began)
            gc.enable()
    return best


def show(stage: int, best: dict[int, dict[str, float]]) -> None:
    base = next(iter(best.values()))
    for ranks, row in best.items():
        cells = [f"{1e3 * row[key]:9.1f} ms {row[key] / base[key]:6.2f}x" for key in ("start_s", "step_s")]
        print(f"{stage:>5}{ranks:>7}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=at_least(2), default=list(RANKS))
    parser.add_argument("--units", type=at_least(1), default=UNITS)
    parser.add_argument("--parameters", type=at_least(1), default=PARAMETERS, help="of each unit")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--out", type=Path, help="a folder for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    onefold.init()
    elements = max(options.ranks) // options.parameters * ALIGN

    def build() -> Toy:
        return Toy(options.units, options.parameters, elements)

    Rank(options.ranks[0], options.stages[0], Toy(2, 2)).step()  # imports what is imported at first use
    print(f"{options.units} units of {options.parameters} parameters: CPU time of rank 0, the best of many turns")
    print(f"stage  ranks{'start':>12}{'':>7}{'a step':>12}")
    found = {}
    for stage in options.stages:
        found[stage] = measure(stage, options.ranks, build, options.rounds)
        show(stage, found[stage])
    if options.out:
        arguments = {key: value for key, value in vars(options).items() if key != "out"}
        told = {
            "work": {"name": "rank-of-many", "elements": elements, **arguments},
            "machine": machine(cuda=False),
            "versions": versions(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shown_command("benchmarks.rank_of_many", sys.argv[1:]),
            "stages": found,
        }
        write(file_of(options.out, "rank-of-many", told), told)


if __name__ == "__main__":
    main()
