"""Which rank holds which elements of each whole tensor, and which rank updates it.

At stages 1 to 3 ranks of the mesh axis "shard" hold pieces of a tensor. A tensor that is split over "tp" has one owner
among the ranks of both axes, which all hold pieces of it. A tensor that is not split is on all ranks of "tp", and has
an owner among the ranks of each "tp" coordinate, so that it is updated alike on all of them. Where optimizer state is
replicated (stage 0), only ranks of "tp" hold parts of a tensor, and only tensors that are split need an owner.

Elements are numbered as in a checkpoint: part by part (model/element_order.py). Ranks of "tp" may have cut their parts
into other units, so they tell each other which elements they hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onefold.comm.meter import Label
from onefold.cost.layout import Span
from onefold.cost.owners import Owners, WholeTensor
from onefold.errors import OptimizerError
from onefold.model.dtensor_shards import TensorShard
from onefold.model.element_order import Order, order_of
from onefold.runtime.engine import Engine
from onefold.runtime.full_parameters import check_split_dim
from onefold.settings.placement import Scope
from onefold.state.unit import Unit

NOTHING = Span(0, 0)


class ToOwn(NamedTuple):
    """A tensor that needs an owner."""

    name: str
    shape: tuple[int, ...]
    work: int | None  # of its update, if the class says so
    held: tuple[Span, ...]  # elements that each rank of "shard" holds, of those with this rank's "tp" coordinate
    split: bool  # over "tp"
    unit: str


class PlannedRound(NamedTuple):
    """Tensors that are updated at once, at most one on each rank."""

    names: list[str]  # of those that this rank takes part in
    numel: int  # of the largest, on whatever rank


class _Row(NamedTuple):
    """What one rank says."""

    shard: int  # its place along the axis
    tp: int
    held: Mapping[str, tuple[int, int, str]]  # of tensors that are split: elements, and the unit that they are in


class Ownership:
    def __init__(self, engine: Engine) -> None:
        comms = engine.comms
        self.replicated = engine.units[0].placement.optimizer is Scope.REPLICATED
        self.comm = comms.tp if self.replicated else comms.owners
        self._shard, self._tp, self._engine = comms.shard, comms.tp, engine
        self._owners = Owners(self.comm.size)
        self._held: dict[str, tuple[Span, ...]] = {}  # elements that each rank holds, by name
        self._split: set[str] = set()

    # -- before there are owners --------------------------------------------------------------------------------------

    def part(self, name: str) -> TensorShard | None:
        """Which part of a full tensor this rank's parameter is; None if it is all of it."""
        check_split_dim(self._engine, name, "an optimizer that needs whole tensors")
        return self._engine.resolved.tensor_shards.get(name)

    def order(self, unit: Unit, slot: int) -> Order:
        """The shape of a full tensor, and the order of its elements."""
        return order_of(self.part(unit.layout.slots[slot].name), tuple(unit.size(slot)), unit.stride(slot))

    def first(self, order: Order, name: str) -> int:
        """The number of this rank's first element of a full tensor."""
        part = self.part(name)
        return part.start * order.row_numel if part is not None else 0

    def is_shared(self, name: str) -> bool:
        """Whether several ranks hold pieces of a tensor, so that it needs an owner."""
        return not self.replicated or self.part(name) is not None

    # -- owners -------------------------------------------------------------------------------------------------------

    def assign(self, tensors: Sequence[ToOwn], *, by_unit: bool) -> None:
        """Chooses owners. With `by_unit`, raises unless all ranks of "tp" have the same units. Collective."""
        rows = self._exchange([one for one in tensors if one.split])
        place = {(row.shard, row.tp): rank for rank, row in enumerate(rows)}
        shards, tps = 1 + max(row.shard for row in rows), self._tp.size
        columns = tuple(tuple(place[shard, tp] for tp in range(tps)) for shard in range(shards))
        number = {name: index for index, name in enumerate(self._engine.names)}
        new: dict[str, WholeTensor] = {}
        for one in sorted(tensors, key=lambda one: number[one.name]):  # units may differ between ranks of "tp"
            if one.split:
                self._split.add(one.name)
                said = [row.held[one.name] for row in rows]
                if by_unit:
                    self._check_units(one.name, [unit for *_, unit in said])
                held = tuple(Span(start, stop) for start, stop, _ in said)
                new[one.name] = WholeTensor(one.shape, tuple(span.numel for span in held), one.work)
            else:
                mine = {columns[shard][self._tp.rank]: span for shard, span in enumerate(one.held)}
                held = tuple(mine.get(rank, NOTHING) for rank in range(self.comm.size))
                choices = columns if tps > 1 else ()
                new[one.name] = WholeTensor(one.shape, tuple(span.numel for span in one.held), one.work, choices)
            self._held[one.name] = held
        self._owners.assign(new)
        if new:
            self.comm.connect_swaps()

    def _exchange(self, split: Sequence[ToOwn]) -> list[_Row]:
        """What every rank holds of tensors that are split. Collective over "tp" and "shard" if there is a "tp"."""
        size = self._tp.size
        shards = self.comm.size // size
        told = [{one.name: (*one.held[shard], one.unit) for one in split} for shard in range(shards)]
        if size == 1 or self.comm.simulated:
            return [_Row(shard, tp, told[shard]) for shard in range(shards) for tp in range(size)]
        shard = 0 if self.replicated else self._shard.rank
        mine = json.dumps(_Row(shard, self._tp.rank, told[shard])).encode()
        return [_Row(*json.loads(row)) for row in self.comm.exchange(mine, Label("agree", "whole tensors"))]

    def _check_units(self, name: str, units: Sequence[str]) -> None:
        if len(set(units)) > 1:
            raise OptimizerError(
                f"{name} is in unit {units[0]!r} on one rank of 'tp' and in unit {max(set(units) - {units[0]})!r} on "
                f"another, because they hold parts of different sizes; offloaded optimizer state and step_in_backward "
                f"need equal units for whole tensors: use a bucket_bytes with which each block is a unit, or neither"
            )

    def of(self, name: str) -> int:
        """The rank of `comm` that updates a tensor, or this rank's copy of it."""
        return self._owners.of(name, self._tp.rank)

    def is_split(self, name: str) -> bool:
        """Whether ranks of "tp" hold different elements of a tensor."""
        return name in self._split

    def held(self, name: str) -> tuple[Span, ...]:
        """The elements of a tensor that each rank of `comm` holds, as far as they are sent to this rank's owner."""
        return self._held[name]

    def rounds(self, names: Sequence[str]) -> list[PlannedRound]:
        """These tensors in rounds, in each of which every rank updates at most one. All ranks of `comm` have equally
        many rounds, of the same sizes."""
        return [
            PlannedRound([turn.name for turn in turns if turn.owner == self.of(turn.name)], max(t.numel for t in turns))
            for turns in self._owners.rounds(names)
        ]
