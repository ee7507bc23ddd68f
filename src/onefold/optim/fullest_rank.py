"""What ranks decide alike where memory differs: by the fullest of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onefold.comm.meter import Label
from onefold.runtime.engine import Engine


class FullestRank:
    """Numbers and units that all ranks of a model agree on. Every method is collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _exchange(self, mine: str) -> list[str]:
        rows = self._engine.comms.world.exchange(mine.encode(), Label("agree", "memory"))
        self._engine.comm.meter.cut()
        return [row.decode() for row in rows]

    def smallest(self, mine: int) -> int:
        return min(map(int, self._exchange(str(int(mine)))))

    def largest(self, mine: float) -> float:
        return max(map(float, self._exchange(repr(mine))))

    def largest_of_each(self, mine: Sequence[int]) -> list[int]:
        """At each position, the largest number of any rank."""
        rows = self._exchange(" ".join(map(str, mine)))
        return [max(found) for found in zip(*(map(int, row.split()) for row in rows), strict=True)]

    def all_of(self, mine: Collection[int]) -> list[frozenset[int]]:
        """The numbers that each rank has chosen."""
        rows = self._exchange(" ".join(map(str, sorted(mine))))
        return [frozenset(map(int, row.split())) for row in rows]

    def common(self, mine: Collection[int]) -> frozenset[int]:
        """The units that every rank has chosen; they fit on each, since fewer units fit where more do."""
        return frozenset.intersection(*self.all_of(mine))
