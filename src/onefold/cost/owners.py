"""Which rank updates which whole tensor. Integers only: every rank computes the same answer, and nothing is sent.

Optimizers such as Muon need all of a tensor to update any of it. Each tensor has one owner, so that its optimizer state
is kept once. Tensors are assigned from the costliest on, each to the rank that has the least to do so far; if several
have equally little, to the one that holds the most of the tensor. Tensors that come later, when parameters are
unfrozen, change no earlier assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import NamedTuple


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Of a matrix: in each step two products of it with a square of its smaller side, and one of two such squares."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


class WholeTensor(NamedTuple):
    """A tensor that one rank updates."""

    shape: tuple[int, ...]
    held: tuple[int, ...]  # elements that each rank holds of it
    work: int | None = None  # of its update, if the class says so

    @property
    def cost(self) -> int:
        """Multiplications of a function of a matrix, as Newton-Schulz is: rows x columns x the smaller of both."""
        if self.work is not None:
            return self.work
        numel = prod(self.shape)
        rows = self.shape[0] if self.shape else 1
        return numel * min(rows, numel // max(rows, 1))


class Owners:
    """The owner of each tensor, by its name.

    >>> owners = Owners(2)
    >>> owners.assign({"a": WholeTensor((4, 4), (16, 0)), "b": WholeTensor((2, 4), (0, 8))})
    >>> owners.of("a"), owners.of("b")
    (0, 1)
    """

    def __init__(self, ranks: int) -> None:
        self._work = [0] * ranks
        self._owner: dict[str, int] = {}
        self._cost: dict[str, int] = {}

    def assign(self, tensors: Mapping[str, WholeTensor]) -> None:
        """Chooses owners of tensors that have none."""
        new = [name for name in tensors if name not in self._owner]
        for name in sorted(new, key=lambda name: -tensors[name].cost):  # of equal ones in the order they came
            tensor = tensors[name]
            rank = min(range(len(self._work)), key=lambda rank: (self._work[rank], -tensor.held[rank]))
            self._work[rank] += tensor.cost
            self._owner[name], self._cost[name] = rank, tensor.cost

    def of(self, name: str) -> int:
        return self._owner[name]

    def rounds(self, names: Sequence[str]) -> list[list[str]]:
        """These tensors in rounds: in each, every rank updates at most one; ranks begin with their costliest."""
        by_rank: list[list[str]] = [[] for _ in self._work]
        for name in sorted(names, key=lambda name: -self._cost[name]):
            by_rank[self._owner[name]].append(name)
        return [[name for name in row if name is not None] for row in zip_longest(*by_rank)]
