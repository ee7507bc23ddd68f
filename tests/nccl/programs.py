"""Programs in which ranks run different blocks of one model in the same step."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import nn

from tests.models import Chain, Residual

BLOCKS = 5

Step = list[list[list[int]]]  # forwards of a step: for each the blocks that each rank runs


@dataclass(frozen=True)
class Program:
    """What all ranks run in every step, and which steps are followed by an evaluation of the last forward."""

    steps: list[Step]
    evaluated: list[bool]
    together: bool  # one backward of all forwards, or one each


def skipping(ranks: int, steps: int = 12) -> Program:
    """Every rank skips another block in every step, and sometimes none: 6 choices for 5 blocks."""
    kept = [
        [[[b for b in range(BLOCKS) if b != (7 * step + 3 * rank) % 6] for rank in range(ranks)]]
        for step in range(steps)
    ]
    return Program(kept, [False] * steps, together=True)


def random_program(ranks: int, seed: int, together: bool) -> Program:
    """In each forward, all ranks keep one order of blocks, of which each skips some and runs some twice in a row."""
    dice = random.Random(seed)

    def forward() -> list[list[int]]:
        return [[b for b in range(BLOCKS) for _ in range(dice.choice([0, 1, 1, 2]))] for _ in range(ranks)]

    steps = [[forward() for _ in range(1 if together else dice.randint(1, 2))] for _ in range(dice.randint(2, 3))]
    return Program(steps, [dice.random() < 0.5 for _ in steps], together)


class Picks:
    """The blocks that the next forward of a rank runs."""

    def __init__(self) -> None:
        self.ranks: list[list[int]] = []

    def __call__(self, step: int, rank: int) -> list[int]:
        return self.ranks[rank]


def chain(picks: Picks, width: int) -> Chain:
    """A model of blocks between a first and a last layer, whose next forward runs the blocks that `picks` says."""
    layers = nn.ModuleList(Residual(width) for _ in range(BLOCKS))
    return Chain(picks, layers, nn.Linear(width, 8), nn.Linear(width, width))
