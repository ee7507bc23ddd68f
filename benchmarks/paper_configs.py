"""The ZeRO paper's configurations C1 to C5 under the paper's budget: largest model, largest batch, memory at the peak.

python benchmarks/paper_configs.py [--json]      # 32 GB V100s, 16 of them tensor-parallel; planned, not run

The paper's figures are of runs and ours are upper bounds, so it is the order that must agree: C1 < C3 < C2 < C4 < C5
for the size of a model, C1 < C3 < C4 <= C5 and C1 < C2 < C4 for the batch. (The paper ran C2 at a smaller batch than
C3; its states and checkpoints take 21 of 32 GB there, so something else than memory held it back.)
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import hardware
from onefold.cost.search import Question, fits, largest_batch, most
from onefold.cost.shapes import PAPER, Shape
from onefold.cost.states import StateCost
from onefold.cost.work import Work
from onefold.settings.widths import Widths
from onefold.settings.zero import PRESETS

TP, MIXED, ADAM = 16, Widths(compute=2, wire=2, grad=2, master=4), StateCost(8)
WIDTH, HEADS = 8192, 64
PAPER_SIZES = {"C1": 40, "C2": 60, "C3": 50, "C4": 140, "C5": 150}  # billions, 400 devices, batch 16
PAPER_BATCHES = {"C1": 2, "C2": 4, "C3": 8, "C4": 32, "C5": 32}  # 60B on 128 devices


class Config(NamedTuple):
    """What one configuration reaches."""

    name: str
    largest_billions: float  # parameters, on 400 devices at batch 16
    largest_batch: int  # of 60B on 128 devices
    cached_40b: int  # bytes at the peak, 400 devices, batch 16
    cached_100b: int | None  # None where it does not fit


def priced(name: str, shape: Shape, ranks: int, batch: int) -> Estimate:
    question = Question(
        work=Work(widths=MIXED, shape=shape), ranks=ranks, hardware=hardware("v100-32"), cost=ADAM, tp=TP
    )
    fields = PRESETS[name]
    return question.price(Choice(fields["stage"], activations=fields["activations"]), question.grid(), batch)


def wide(layers: int) -> Shape:
    return Shape(layers=layers, hidden=WIDTH, heads=HEADS)


def of(name: str) -> Config:
    layers = most(lambda count: fits(priced(name, wide(count), 400, 16)), 1000)
    at_60b = priced(name, PAPER["60b-wide-128"].shape, 128, 1)
    question = Question(work=at_60b.work, ranks=128, hardware=at_60b.hardware, cost=ADAM, tp=TP)
    small, large = (priced(name, wide(count), 400, 16) for count in (50, 125))
    return Config(
        name,
        wide(layers).numel / 1e9,
        largest_batch(question, at_60b.choice, at_60b.grid),
        small.peak_bytes,
        large.peak_bytes if fits(large) else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    found = [of(name) for name in PRESETS]
    if parser.parse_args().json:
        print(json.dumps([row._asdict() for row in found], indent=1))
        return
    print("      largest model    (paper)   largest batch, 60B   (paper)   peak at 40B   peak at 100B")
    for row in found:
        large = f"{row.cached_100b / 1e9:.1f} GB" if row.cached_100b else "does not fit"
        print(
            f"{row.name}   {row.largest_billions:>10.0f} B   {PAPER_SIZES[row.name]:>6} B   {row.largest_batch:>18}   "
            f"{PAPER_BATCHES[row.name]:>7}   {row.cached_40b / 1e9:>8.1f} GB   {large:>12}"
        )


if __name__ == "__main__":
    main()
