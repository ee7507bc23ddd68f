"""The sizes of units, in elements and in bytes per element, from which all formulas of the planner start.

Sizes come from the layout that the runtime itself uses, or from a number of parameters split evenly, without padding.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from onefold.cost.layout import UnitLayout
from onefold.settings.widths import Widths


class UnitSize(NamedTuple):
    """The sizes of one unit on one rank."""

    name: str
    used_numel: int  # elements of parameters, without padding
    numel: int  # elements of the flat buffer, with padding
    shard: int  # elements of one shard
    body_numel: int  # elements updated where the optimizer is replicated: all but the padding that makes shards equal
    owned_numel: int  # elements that this rank updates where the optimizer is sharded
    param_count: int
    widths: Widths
    blocks: tuple[str, ...] = ()  # that its parameters belong to, in order; none outside every block
    trained: bool = True
    largest_numel: int = 0  # elements of its largest parameter, where parameters are known
    whole_numel: int = 0  # elements of matrices of hidden layers, which Muon updates
    whole_count: int = 0  # how many those matrices are

    @property
    def unsharded_bytes(self) -> int:
        return self.numel * self.widths.compute


def size_of_layout(
    layout: UnitLayout, rank: int, widths: Widths, *, blocks: tuple[str, ...] = (), trained: bool = True,
    matrices: Container[str] = (),
) -> UnitSize:  # fmt: skip
    """`matrices` are the names of parameters that Muon updates."""
    whole = [slot.numel for slot in layout.slots if slot.name in matrices]
    return UnitSize(
        name=layout.name,
        used_numel=layout.used_numel,
        numel=layout.numel,
        shard=layout.shard_numel,
        body_numel=layout.body.numel,
        owned_numel=layout.body.clip(layout.shard(rank)).numel,
        param_count=len(layout.slots),
        widths=widths,
        blocks=blocks,
        trained=trained,
        largest_numel=max((slot.numel for slot in layout.slots), default=0),
        whole_numel=sum(whole),
        whole_count=len(whole),
    )


def sizes_of_count(numel: int, ranks: int, widths: Widths, units: int) -> list[UnitSize]:
    """A number of parameters as units of equal size, without padding; the first ones take the remainder."""
    each, more = divmod(numel, units)
    sizes = []
    for index in range(units):
        unit_numel = each + (index < more)
        shard = -(-unit_numel // ranks)
        size = UnitSize(f"unit {index}", unit_numel, unit_numel, shard, unit_numel, shard, 0, widths)
        sizes.append(size._replace(whole_numel=unit_numel, whole_count=1))
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
        return sum(unit.used_numel for unit in self.units)

    @property
    def trained(self) -> list[UnitSize]:
        return [unit for unit in self.units if unit.trained]
