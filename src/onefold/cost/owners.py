"""Which rank updates which whole tensor. Integers only: every rank computes the same answer, and nothing is sent.

Optimizers such as Muon need all of a tensor to update any of it. Each tensor has one owner, so that its optimizer state
is kept once. Tensors are assigned from the costliest on, each to the rank that has the least to do so far; if several
have equally little, to the one that holds the most of the tensor. Tensors that come later, when parameters are
unfrozen, change no earlier assignment.

A tensor that all ranks of the mesh axis "tp" have, because it is not split over them, has an owner on each of them.
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
    held: tuple[int, ...]  # elements that each rank holds of it; or each choice, see there
    work: int | None = None  # of its update, if the class says so
    choices: tuple[tuple[int, ...], ...] = ()  # ranks, one along "tp" for each owner that it needs; none: each rank

    @property
    def cost(self) -> int:
        """Multiplications of a function of a matrix, as Newton-Schulz is: rows x columns x the smaller of both."""
        if self.work is not None:
            return self.work
        numel = prod(self.shape)
        rows = self.shape[0] if self.shape else 1
        return numel * min(rows, numel // max(rows, 1))


class Turn(NamedTuple):
    """A tensor that one rank updates in a round."""

    name: str
    owner: int
    numel: int


class Owners:
    """The owners of each tensor, by its name.

    >>> owners = Owners(2)
    >>> owners.assign({"a": WholeTensor((4, 4), (16, 0)), "b": WholeTensor((2, 4), (0, 8))})
    >>> owners.of("a"), owners.of("b")
    (0, 1)
    """

    def __init__(self, ranks: int) -> None:
        self._work = [0] * ranks
        self._owners: dict[str, tuple[int, ...]] = {}
        self._cost: dict[str, int] = {}
        self._numel: dict[str, int] = {}

    def assign(self, tensors: Mapping[str, WholeTensor]) -> None:
        """Chooses owners of tensors that have none."""
        each = tuple((rank,) for rank in range(len(self._work)))
        new = [name for name in tensors if name not in self._owners]
        for name in sorted(new, key=lambda name: -tensors[name].cost):  # of equal ones in the order they came
            tensor = tensors[name]
            rows = zip(tensor.choices or each, tensor.held, strict=True)
            ranks, _ = min(rows, key=lambda row: (max(self._work[rank] for rank in row[0]), -row[1]))
            for rank in ranks:
                self._work[rank] += tensor.cost
            self._owners[name], self._cost[name], self._numel[name] = ranks, tensor.cost, prod(tensor.shape)

    def of(self, name: str, row: int = 0) -> int:
        """The owner of a tensor; of one that has several, that at this place along "tp"."""
        ranks = self._owners[name]
        return ranks[row] if len(ranks) > 1 else ranks[0]

    def rounds(self, names: Sequence[str]) -> list[list[Turn]]:
        """These tensors in rounds: in each, every rank updates at most one; ranks begin with their costliest. The order
        of `names` does not matter."""
        by_rank: list[list[Turn]] = [[] for _ in self._work]
        wanted = set(names)
        for name in sorted((name for name in self._owners if name in wanted), key=lambda name: -self._cost[name]):
            for rank in self._owners[name]:
                by_rank[rank].append(Turn(name, rank, self._numel[name]))
        return [[turn for turn in row if turn is not None] for row in zip_longest(*by_rank)]
