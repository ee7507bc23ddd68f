"""How large units are, in elements and in bytes per element: what every formula of the planner starts from.

Sizes come from the layout the runtime itself uses, or from a bare parameter count cut evenly, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onefold.cost.layout import UnitLayout
from onefold.settings.widths import Widths


class UnitSize(NamedTuple):
    """One unit, as one rank of `ranks` sees it."""

    name: str
    used: int  # elements of parameters
    whole: int  # with padding
    shard: int  # of one rank
    body: int  # what is updated where the optimizer is whole: all but the tail that makes shards equal
    owned: int  # what this rank updates where it is sharded
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
    """A bare number of parameters as equal units, without padding; the first ones take what is left over."""
    each, more = divmod(numel, units)
    sizes = []
    for index in range(units):
        whole = each + (index < more)
        shard = -(-whole // ranks)
        sizes.append(UnitSize(f"unit {index}", whole, whole, shard, whole, shard, 0, widths))
    return sizes


@dataclass(frozen=True)
class Sizes:
    """All units of what one rank holds, in registration order."""

    units: tuple[UnitSize, ...]
    ranks: int
    buffers_bytes: int = 0
    flags: int = 0  # trained parameters: one byte each says who used which

    @property
    def numel(self) -> int:
        return sum(unit.used for unit in self.units)

    @property
    def trained(self) -> list[UnitSize]:
        return [unit for unit in self.units if unit.trained]
