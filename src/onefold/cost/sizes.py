"""The sizes of units, in elements and in bytes per element, from which all formulas of the planner start.

Sizes come from the layout that the runtime itself uses, or from a number of parameters split evenly, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onefold.cost.layout import UnitLayout
from onefold.settings.widths import Widths


class UnitSize(NamedTuple):
    """The sizes of one unit on one rank."""

    name: str
    used: int  # elements of parameters, without padding
    whole: int  # elements of the flat buffer, with padding
    shard: int  # elements of one shard
    body: int  # elements updated where the optimizer is replicated: all but the padding that makes shards equal
    owned: int  # elements that this rank updates where the optimizer is sharded
    params: int
    widths: Widths
    block: str = ""
    trained: bool = True
    largest: int = 0  # elements of its largest parameter, where parameters are known

    @property
    def whole_bytes(self) -> int:
        return self.whole * self.widths.compute


def of_layout(layout: UnitLayout, rank: int, widths: Widths, *, block: str = "", trained: bool = True) -> UnitSize:
    return UnitSize(
        name=layout.name,
        used=layout.used_numel,
        whole=layout.numel,
        shard=layout.shard_numel,
        body=layout.body.numel,
        owned=layout.body.clip(layout.shard(rank)).numel,
        params=len(layout.slots),
        widths=widths,
        block=block,
        trained=trained,
        largest=max((slot.numel for slot in layout.slots), default=0),
    )


def of_count(numel: int, ranks: int, widths: Widths, units: int) -> list[UnitSize]:
    """A number of parameters as units of equal size, without padding; the first ones take the remainder."""
    each, more = divmod(numel, units)
    sizes = []
    for index in range(units):
        whole = each + (index < more)
        shard = -(-whole // ranks)
        sizes.append(UnitSize(f"unit {index}", whole, whole, shard, whole, shard, 0, widths))
    return sizes


@dataclass(frozen=True)
class Sizes:
    """All units of one rank's model, in registration order."""

    units: tuple[UnitSize, ...]
    ranks: int
    buffers_bytes: int = 0
    flags: int = 0  # trained parameters: ranks exchange one byte each, whether they used it

    @property
    def numel(self) -> int:
        return sum(unit.used for unit in self.units)

    @property
    def trained(self) -> list[UnitSize]:
        return [unit for unit in self.units if unit.trained]
