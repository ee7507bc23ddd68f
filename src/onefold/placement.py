"""Which state is whole and which is sharded. The ZeRO family is this table; communication follows from it.

| stage | optimizer | gradients | parameters |
|---|---|---|---|
| 0 | whole | whole | whole |
| 1 | shard | whole | whole |
| 2 | shard | shard | whole |
| 3 | shard | shard | shard |

A stage is a row of data. Nothing below this module asks for a stage number.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scope(Enum):
    """How much of a state one rank holds."""

    WHOLE = "whole"
    SHARD = "shard"


class Placement(NamedTuple):
    """The scope of each state of one unit."""

    optimizer: Scope
    gradients: Scope
    parameters: Scope

    def over(self, ranks: int) -> Placement:
        """A shard of one is the whole: nothing need be reduced, copied or gathered over a single rank."""
        return self if ranks > 1 else STAGES[0]


STAGES: dict[int, Placement] = {
    0: Placement(optimizer=Scope.WHOLE, gradients=Scope.WHOLE, parameters=Scope.WHOLE),
    1: Placement(optimizer=Scope.SHARD, gradients=Scope.WHOLE, parameters=Scope.WHOLE),
    2: Placement(optimizer=Scope.SHARD, gradients=Scope.SHARD, parameters=Scope.WHOLE),
    3: Placement(optimizer=Scope.SHARD, gradients=Scope.SHARD, parameters=Scope.SHARD),
}
