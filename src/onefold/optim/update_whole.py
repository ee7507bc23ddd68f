"""The update policies of classes that need whole tensors: each tensor is brought together on its owner, at step() or in
backward.

Where optimizer state is replicated and a tensor is not split over "tp", every rank has all that the update needs, and
nothing is sent. Else, in rounds in which each rank updates at most one tensor: 1 ranks send their pieces of gradients,
and of masters, to the owners  2 owners update  3 owners send the updated pieces of the master back, and each rank
rounds its own into its parameters. So bits do not depend on who holds what. Replicated fp32 parameters that are not
split are their own masters, and the owner has them already.

Pieces arrive in the order of parts (model/element_order.py). If that is not the memory order of the full tensor, as for
a matrix that is split by columns, gradient and master are copied into it for the update.

Tensors are updated on the device, also where the host keeps gradients, masters and optimizer state: products of
matrices are too slow there. Pieces come from the host and go back to it, and an owner's state comes for its update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.spans import span
from onefold.cost.layout import Span
from onefold.optim.host_update import HostGradients
from onefold.optim.ownership import Ownership
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.update_in_backward import UpdateInBackward
from onefold.optim.whole_unit_optimizer import GRADIENT, MASTER, UPDATED, WholeUnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit


class TensorToUpdate(NamedTuple):
    """A tensor that is to be updated."""

    optimizer: WholeUnitOptimizer  # of its unit
    slot: int
    owner: int

    @property
    def unit(self) -> Unit:
        return self.optimizer.unit

    @property
    def numel(self) -> int:
        return self.optimizer.order(self.slot).numel

    @property
    def sends_master(self) -> bool:
        return self.optimizer.sends_master(self.slot)


class Piece:
    """This rank's elements of a tensor, while it is updated."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device) -> None:
        self.of, self.part = of, part
        if of.unit.may_be_edited:
            of.unit.master.take_changed(part)
        self._kept = of.unit.master.begin_update(part)
        [(_, gradient)] = of.unit.gradients.pieces(part)
        self.gradient = gradient.to(device, non_blocking=True)
        self.master = self._kept.to(device, non_blocking=True)

    def end(self) -> None:
        """The master is updated."""
        if self.master is not self._kept:
            self._kept.copy_(self.master)
        self.of.unit.master.end_update(self.part, self._kept)


class Gathered:
    """All of a tensor, on its owner: vectors into which the pieces of other ranks are received."""

    def __init__(self, of: TensorToUpdate, mine: Piece | None, held: Sequence[Span], rank: int, pool: Pool) -> None:
        """`held` has the elements that each rank holds."""
        self.of, self._mine, self._pool = of, mine, pool
        unit, self._here = of.unit, held[rank]
        self._theirs = {other: span for other, span in enumerate(held) if other != rank and span.numel}
        self.gradient = self._pool.take(of.numel, unit.gradients.dtype)
        self._own, place = of.sends_master, unit.layout.slots[of.slot].span
        self.master = self._pool.take(of.numel, unit.master.dtype) if self._own else unit.flat_params.part(place)
        if mine is not None:
            _at(self._here, self.gradient).copy_(mine.gradient)
            if self._own:
                _at(self._here, self.master).copy_(mine.master)

    def of_peers(self, vector: Tensor) -> dict[int, Tensor]:
        """The pieces of a vector that other ranks hold."""
        return {rank: _at(span, vector) for rank, span in self._theirs.items()}

    def finish(self) -> None:
        """Keeps this rank's own piece of the master, and frees the vectors. Nothing is in flight."""
        self._pool.give(self.gradient)
        if self._own:
            if self._mine is not None:
                self._mine.master.copy_(_at(self._here, self.master))
            self._pool.give(self.master)


def _at(span: Span, vector: Tensor) -> Tensor:
    return vector[span.start : span.stop]


class WholeUpdates:
    """Updates of units whose gradients are reduced, and whose states are in memory."""

    def __init__(self, engine: Engine, ownership: Ownership) -> None:
        self._comm, self._pool, self._device, self._ownership = ownership.comm, engine.pool, engine.device, ownership

    def begin(self, optimizer: WholeUnitOptimizer, flags: bytes, inputs: StepInputs) -> list[TensorToUpdate]:
        """Updates what this rank can update alone of the flagged parameters of a unit; the tensors that are left."""
        left = []
        if optimizer.rest is not None:
            self._update_rest(optimizer.rest, flags, inputs)
        for slot in (slot for slot, flag in enumerate(flags) if flag and optimizer.is_whole(slot)):
            if optimizer.is_shared(slot):
                left.append(TensorToUpdate(optimizer, slot, self._ownership.of(optimizer.name(slot))))
            else:
                self._update_here(TensorToUpdate(optimizer, slot, self._comm.rank), inputs)
        return left

    def finish(self, left: Sequence[TensorToUpdate], where: str, inputs: StepInputs) -> None:
        """Updates tensors of which several ranks hold pieces. Collective."""
        tensors = {one.optimizer.name(one.slot): one for one in left}
        for number, turns in enumerate(self._ownership.rounds(list(tensors))):
            self._update_round([tensors[turn.name] for turn in turns], f"{where}round {number}", inputs)

    def _update_rest(self, rest: UnitOptimizer, flags: bytes, inputs: StepInputs) -> None:
        """Updates parameters of a unit that another class updates on shards."""
        factor = inputs.factor(narrow=rest.unit.dtypes.narrow)
        rest.update(inputs.groups, rest.to_update(flags), factor, inputs.bad)

    def _update_here(self, one: TensorToUpdate, inputs: StepInputs) -> None:
        """Updates a tensor of which this rank has all elements."""
        piece = Piece(one, one.optimizer.held(one.slot), self._device)
        self._run(one, piece.master, piece.gradient, inputs)
        piece.end()

    def _update_round(self, tensors: Sequence[TensorToUpdate], label: str, inputs: StepInputs) -> None:
        """Updates tensors of which several ranks hold pieces, each on its owner. Collective."""
        comm, mine = self._comm, None
        parts = {one: one.optimizer.held(one.slot) for one in tensors}
        held = {one: Piece(one, part, self._device) for one, part in parts.items() if part.numel}
        for one in (one for one in tensors if one.owner == comm.rank):  # there is one at most
            spans = self._ownership.held(one.optimizer.name(one.slot))
            mine = Gathered(one, held.get(one), spans, comm.rank, self._pool)
        away = [piece for one, piece in held.items() if one.owner != comm.rank]
        # 1
        sent = {piece.of.owner: piece.gradient for piece in away}
        gradients = comm.swap(sent, mine.of_peers(mine.gradient) if mine else {}, Label(GRADIENT, label))
        sent = {piece.of.owner: piece.master for piece in away if piece.of.sends_master}
        wanted = mine.of_peers(mine.master) if mine and mine.of.sends_master else {}
        comm.swap(sent, wanted, Label(MASTER, label)).wait()
        gradients.wait()
        # 2
        if mine:
            self._run(mine.of, mine.master, mine.gradient, inputs)
        # 3
        updated = {piece.of.owner: piece.master for piece in away}
        comm.swap(mine.of_peers(mine.master) if mine else {}, updated, Label(UPDATED, label)).wait()
        if mine:
            mine.finish()
        for piece in held.values():
            piece.end()

    def _run(self, one: TensorToUpdate, master: Tensor, gradient: Tensor, inputs: StepInputs) -> None:
        """Runs the wrapped class on a tensor; `gradient` is as it was reduced. Both are in the order of parts."""
        pool, order, vector = self._pool, one.optimizer.order(one.slot), master
        factor = inputs.factor(narrow=one.unit.dtypes.narrow)
        scaled = one.unit.dtypes.narrow or not (isinstance(factor, float) and factor == 1.0)
        taken: list[Tensor] = []
        if scaled or order.interleaved:
            taken.append(pool.take(gradient.numel(), master.dtype))  # a product in 16 bits would be rounded to them
            order.to_memory_order(gradient, taken[0])
            gradient = taken[0].mul_(factor) if scaled else taken[0]
        if order.interleaved:
            taken.append(pool.take(master.numel(), master.dtype))
            order.to_memory_order(master, taken[1])
            vector = taken[1]
        with span("update", "step", one.optimizer.name(one.slot)):
            group = inputs.groups[one.optimizer.group_of(one.slot)]
            one.optimizer.update_whole(one.slot, vector, gradient, group, inputs.bad)
        if order.interleaved:
            order.from_memory_order(vector, master)
        for buffer in taken:
            pool.give(buffer)


class UpdateWhole(UpdateAtStep):
    """At step(): first what every rank can update alone, then tensors of all units in common rounds."""

    def __init__(
        self,
        engine: Engine,
        by_unit: Sequence[WholeUnitOptimizer],
        ownership: Ownership,
        updates: type[WholeUpdates] = WholeUpdates,
    ) -> None:
        super().__init__(engine, by_unit)
        self._whole, self._updates = by_unit, updates(engine, ownership)
        self._host = HostGradients(engine) if any(unit.updated_on_host for unit in engine.units) else None

    def reduced(self, index: int, *, final: bool) -> bool:
        return self._host.on_reduced(index, final=final) if self._host is not None else False

    def _update(self, inputs: StepInputs) -> list[Pending]:
        engine, left = self._engine, list[TensorToUpdate]()
        offloaded = [index for index in engine.schedule.order if engine.wait_reduced(index).updated_on_host]
        if offloaded:
            inputs = self._update_offloaded(offloaded, inputs)
        with ExitStack() as updates:
            for index in (index for index in engine.schedule.order if index not in offloaded):
                unit, optimizer = engine.units[index], self._whole[index]
                if not optimizer.slots:
                    continue
                unit.flat_params.wait_for_update()  # of a step before, without a forward between them
                unit.gradients.bring_back()
                flags = optimizer.to_update(engine.used.to_update_of(index))
                updates.enter_context(unit.update(flags))
                left += self._updates.begin(optimizer, flags, inputs)
            self._updates.finish(left, "", inputs)
        units = [one.unit for one in self._whole if one.slots and one.unit.gathers_updated]
        return [pending for unit in units for pending in unit.gather_updated()]

    def _update_offloaded(self, indices: Sequence[int], inputs: StepInputs) -> StepInputs:
        """Updates units whose state the host keeps, one after the other: in memory is the state of one. The inputs,
        with a clipping factor that the host knows."""
        engine, host = self._engine, self._host
        assert host is not None
        engine.tiers.load_for_reading(None)
        inputs = inputs._replace(clip=float(inputs.clip))
        mine = [index for index in indices if self._whole[index].slots]
        for index in mine:
            engine.units[index].flat_params.check_no_user_writes()  # may raise: before any unit is updated
        for index in mine:
            unit, optimizer = engine.units[index], self._whole[index]
            host.offload(index)
            flags = optimizer.to_update(engine.used.to_update_of(index))
            with unit.state_in_memory(write=True), unit.update(flags):
                self._updates.finish(self._updates.begin(optimizer, flags, inputs), f"{unit.name}, ", inputs)
        return inputs


class UpdateWholeInBackward(UpdateInBackward):
    """In backward: the tensors of a unit are brought together as soon as its gradient is reduced; if the host or a file
    keeps its state, that comes for the update."""

    def __init__(
        self, engine: Engine, by_unit: Sequence[WholeUnitOptimizer], groups: list[dict[str, Any]], ownership: Ownership
    ) -> None:
        super().__init__(engine, by_unit, groups, None)
        self._whole, self._updates = by_unit, WholeUpdates(engine, ownership)

    def _on_host(self, index: int) -> bool:
        return False

    def _update_unit(self, index: int) -> None:
        optimizer, inputs = self._whole[index], StepInputs(self._groups, 1.0, 1.0, None)
        unit, flags = optimizer.unit, optimizer.to_update(self._engine.used.to_update_of(index))
        if unit.updated_on_host:
            unit.flat_params.check_no_user_writes()
        with unit.state_in_memory(write=True):
            self._updates.finish(self._updates.begin(optimizer, flags, inputs), f"{unit.name}, ", inputs)
