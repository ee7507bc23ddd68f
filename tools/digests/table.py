"""The 200 cases: settings of a run along nine axes, and mistakes that are refused.

Every pair of values of any two axes occurs, unless no run may have both; the other cases add as many triples as they
can. The table is computed, always to the same rows: its numbers come from `random.Random(seed).random()`, which Python
promises not to change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import NamedTuple

CASES = 200
TRIED = 40  # rows of which the one with most new triples is taken


class Case(NamedTuple):
    """One run: a value for each axis."""

    model: str
    stage: int
    ranks: int
    precision: str
    tier: str
    optimizer: str
    activations: str
    gradients: str
    between: str

    @property
    def name(self) -> str:
        model, stage, ranks, *rest = self
        return "/".join([model, f"stage{stage}", f"n{ranks}", *rest])


class Refusal(NamedTuple):
    """A mistake, by the name it has in `refusals.MISTAKES`."""

    mistake: str
    ranks: int

    @property
    def name(self) -> str:
        return f"refused/{self.mistake}/n{self.ranks}"


AXES: dict[str, tuple[str | int, ...]] = {
    "model": ("gpt-tied", "conv-norm", "moe", "frozen", "skipping", "outside"),
    "stage": (0, 1, 2, 3),
    "ranks": (1, 2, 3),
    "precision": ("fp32", "bf16", "fp16", "split"),
    "tier": ("device", "offload-host", "offload-disk", "parameters-host"),
    "optimizer": ("adamw", "adam", "sgd", "rmsprop", "adagrad"),
    "activations": ("keep", "checkpoint"),
    "gradients": ("plain", "clip", "accumulate-once", "accumulate-each", "step-in-backward"),
    "between": ("nothing", "evaluate", "edit", "resume"),
}

REFUSALS = (
    Refusal("stage-7", 2),
    Refusal("offload-at-stage-0", 2),
    Refusal("offload-parameters-at-stage-2", 1),
    Refusal("disk-without-path", 1),
    Refusal("split-master-in-fp16", 1),
    Refusal("whole-tensor-optimizer", 2),
    Refusal("step-in-backward-in-fp16", 2),
    Refusal("clip-after-step-in-backward", 2),
    Refusal("accumulate-with-step-in-backward", 2),
    Refusal("plain-backward-in-fp16", 3),
    Refusal("step-without-gradients", 2),
    Refusal("sharded-twice", 2),
    Refusal("two-optimizers", 3),
    Refusal("state-dict-at-stage-3", 2),
    Refusal("sharded-gradient-read", 3),
    Refusal("mesh-too-large", 2),
)


def legal(values: dict[str, str | int]) -> bool:
    """Some run may have these values; axes that are not named are free."""
    stage, tier = values.get("stage"), values.get("tier", "device")
    if tier == "parameters-host" and stage not in (None, 3):
        return False
    if tier != "device" and stage == 0:
        return False
    return not (values.get("gradients") == "step-in-backward" and values.get("precision") == "fp16")


Some = tuple[tuple[str, "str | int"], ...]  # values of some axes


def subsets(values: dict[str, str | int], size: int) -> Iterator[Some]:
    return combinations(values.items(), size)


def legal_pairs() -> list[Some]:
    found = []
    for one, other in combinations(AXES, 2):
        pairs = [((one, a), (other, b)) for a in AXES[one] for b in AXES[other]]
        found += [pair for pair in pairs if legal(dict(pair))]
    return found


@cache
def table() -> tuple[Case | Refusal, ...]:
    """All cases. 1 rows until every legal pair occurs  2 rows with the most new triples  3 refusals."""
    numbers = random.Random(19)
    rows: dict[str, Case] = {}
    triples: set[Some] = set()
    missing = dict.fromkeys(legal_pairs())
    while len(rows) < CASES - len(REFUSALS):
        start = dict(next(iter(missing), ()))
        tried = [_row(start, numbers) for _ in range(TRIED)]
        fresh = [row for row in tried if Case(**row).name not in rows]
        best = max(fresh, key=lambda row: len(set(subsets(row, 3)) - triples))
        rows[Case(**best).name] = Case(**best)
        triples.update(subsets(best, 3))
        for pair in subsets(best, 2):
            missing.pop(pair, None)
    assert not missing, f"{len(missing)} pairs occur in no case, for example {next(iter(missing))}; raise CASES"
    return (*rows.values(), *REFUSALS)


def _row(start: dict[str, str | int], numbers: random.Random) -> dict[str, str | int]:
    """A legal row with these values."""
    while True:
        row = {axis: values[int(numbers.random() * len(values))] for axis, values in AXES.items()} | start
        if legal(row):
            return row
