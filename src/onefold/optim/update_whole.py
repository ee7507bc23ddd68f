"""The update policies of classes that need whole tensors: each tensor is brought together on its owner, at step() or in
backward.

Where optimizer state is replicated and a tensor is not split over "tp", every rank has all that the update needs, and
nothing is sent. Else tensors are updated in rounds (whole_rounds.py), whose messages overlap: at step() with the update
of other tensors and of shards, in backward with the backward of the units that follow. Bits do not depend on who holds
what.

Pieces arrive in the order of parts (model/element_order.py). If that is not the memory order of the full tensor, as for
a matrix that is split by columns, gradient and master are copied into it for the update.

Tensors are updated on the device, also where the host keeps gradients, masters and optimizer state: products of
matrices are too slow there. Pieces come from the host and go back to it, and an owner's state comes for its update.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.optim.host_update import HostGradients
from onefold.optim.newton_schulz import ReducedGradient
from onefold.optim.ownership import Ownership
from onefold.optim.step_under_way import StepUnderWay
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.update_in_backward import UpdateInBackward
from onefold.optim.update_lanes import LANES, Lanes
from onefold.optim.whole_pieces import Piece, TensorToUpdate
from onefold.optim.whole_rounds import Round, Rounds, RoundToSend
from onefold.optim.whole_unit_optimizer import WholeUnitOptimizer
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit

BESIDE = 4  # times bucket_bytes: two tensors that are updated, one that arrives, one that goes back


class WholeUpdates:
    """Updates of units whose gradients are reduced, and whose states are in memory. `on_end` is called for a unit when
    the last of its tensors that were added to the rounds has been updated on all ranks."""

    def __init__(
        self,
        engine: Engine,
        ownership: Ownership,
        on_end: Callable[[Unit], None],
        under_way: StepUnderWay,
        *,
        beside: bool,
        directions: bool,
    ) -> None:
        """With `beside` activations have been freed, so that a device with streams has room for more tensors. Owners
        send `directions` back, or masters."""
        self._comm, self._pool, self._device, self._ownership = ownership.comm, engine.pool, engine.device, ownership
        compute = max(unit.dtypes.compute.itemsize for unit in engine.units)
        split = any(unit.dtypes.master == "split" for unit in engine.units)
        # of a gradient, a direction and this rank's piece of it; or a gradient, a master and the piece of a split one
        self._element_bytes = compute + (2 * max(compute, 2) if directions else max(compute, 4) + 4 * split)
        self._directions = directions
        self._left: Counter[int] = Counter()  # tensors of each unit in rounds that have not ended, by the unit's id
        self._on_end, self._under_way = on_end, under_way
        spares = not (self._pool.keeps or _offloads(engine))  # memory is no reason to update one by one
        self._lanes = Lanes(engine.device, LANES if spares else 1)
        self._most_bytes = engine.resolved.settings.bucket_bytes * (BESIDE if spares and beside else 1)
        run = partial(self._run, direction=directions)
        self.rounds = Rounds(self._make, run, self._tensor_ended, self._most_bytes, self._lanes)

    def shared(self, optimizer: WholeUnitOptimizer, flags: bytes) -> list[TensorToUpdate]:
        """The flagged tensors of a unit of which several ranks hold pieces."""
        slots = [slot for slot in _whole_slots(optimizer, flags) if optimizer.is_shared(slot)]
        return [TensorToUpdate(optimizer, slot, self._ownership.of(optimizer.name(slot))) for slot in slots]

    def add(self, tensors: Sequence[TensorToUpdate], where: str, inputs: StepInputs) -> int:
        """Starts to update tensors of which several ranks hold pieces; the number of rounds. Collective."""
        by_name = {one.optimizer.name(one.slot): one for one in tensors}
        self._left.update(id(one.unit) for one in tensors)
        planned = [
            RoundToSend([by_name[name] for name in names], f"{where}round {i}", numel * self._element_bytes, inputs)
            for i, (names, numel) in enumerate(self._ownership.rounds(list(by_name)))
        ]
        self.rounds.add(planned)
        return len(planned)

    def update_alone(self, optimizer: WholeUnitOptimizer, flags: bytes, inputs: StepInputs) -> None:
        """Updates what this rank can update alone of the flagged parameters of a unit."""
        if optimizer.rest is not None:
            self._update_rest(optimizer.rest, flags, inputs)
        under_way: deque[tuple[Piece, StreamEvent]] = deque()
        for slot in (slot for slot in _whole_slots(optimizer, flags) if not optimizer.is_shared(slot)):
            one = TensorToUpdate(optimizer, slot, self._comm.rank)
            most = self._lanes.number if self._lanes.number * one.numel * self._element_bytes <= self._most_bytes else 1
            while len(under_way) >= most:
                _end(*under_way.popleft())
            piece = Piece(one, optimizer.held(slot), self._device)
            run = partial(self._run, one, piece.master, piece.gradient, inputs)
            try:
                under_way.append((piece, self._lanes.run(run, beside=most > 1)))
            except BaseException:
                self._lanes.join()
                for dropped in (piece, *(before for before, _ in under_way)):
                    dropped.drop()
                raise
        while under_way:
            _end(*under_way.popleft())

    def update_now(self, optimizer: WholeUnitOptimizer, flags: bytes, inputs: StepInputs) -> None:
        """Updates the flagged parameters of a unit. Collective."""
        self.add(self.shared(optimizer, flags), f"{optimizer.unit.name}, ", inputs)
        self.update_alone(optimizer, flags, inputs)
        self.rounds.drain()

    @contextmanager
    def forgotten_after_error(self) -> Iterator[None]:
        """Inside, rounds go on; after an error none is left for the next step."""
        try:
            yield
        except BaseException:
            self.rounds.forget()
            self._left.clear()
            raise

    def _make(self, planned: RoundToSend) -> Round:
        writes = self._under_way.writes
        return Round(planned, self._ownership, self._pool, self._device, writes, directions=self._directions)

    def _tensor_ended(self, one: TensorToUpdate) -> None:
        self._left[id(one.unit)] -= 1
        if not self._left[id(one.unit)]:
            self._on_end(one.unit)

    def _update_rest(self, rest: UnitOptimizer, flags: bytes, inputs: StepInputs) -> None:
        """Updates parameters of a unit that another class updates on shards."""
        factor = inputs.factor(narrow=rest.unit.dtypes.narrow)
        self._under_way.writes(rest.unit)
        # state that is made on the host is no memory of the device: modes that count bytes would take it for that
        with _disable_current_modes() if rest.unit.updated_on_host else nullcontext():
            rest.update(inputs.groups, rest.to_update(flags), factor, inputs.bad)

    def _run(
        self, one: TensorToUpdate, answer: Tensor, gradient: Tensor, inputs: StepInputs, *, direction: bool = False
    ) -> None:
        """Updates `answer`, the master of a tensor, or writes the `direction` of the tensor to it. `gradient` is as it
        was reduced. Both are in the order of parts."""
        order, vector, group = one.optimizer.order(one.slot), answer, one.group(inputs)
        with ExitStack() as taken:
            factor = inputs.factor(narrow=one.unit.dtypes.narrow)
            reduced = ReducedGradient(gradient, factor, one.unit.master.dtype)
            if not (direction and one.optimizer.scales_in_update(one.slot, reduced, group)):
                reduced = reduced._replace(values=self._copied(one, reduced, taken), factor=1.0)
            if order.interleaved:
                vector = self._take(one, answer.dtype, taken)
                if not direction:
                    order.to_memory_order(answer, vector)
            with span("update", "step", one.optimizer.name(one.slot)):
                self._under_way.writes(one.unit)
                if direction:
                    one.optimizer.find_direction(one.slot, vector, reduced, group, inputs.bad)
                else:
                    one.optimizer.update_whole(one.slot, vector, reduced.values, group, inputs.bad)
            if order.interleaved:
                order.from_memory_order(vector, answer)

    def _copied(self, one: TensorToUpdate, gradient: ReducedGradient, taken: ExitStack) -> Tensor:
        """The gradient as the class sees it: scaled, in the dtype of the master and in memory order."""
        order = one.optimizer.order(one.slot)
        if not (gradient.has_factor or one.unit.dtypes.narrow or order.interleaved):
            return gradient.values
        wide = self._take(one, gradient.dtype, taken)  # a product in 16 bits would be rounded to them
        order.to_memory_order(gradient.values, wide)
        return wide.mul_(gradient.factor) if gradient.has_factor else wide

    def _take(self, one: TensorToUpdate, dtype: torch.dtype, taken: ExitStack) -> Tensor:
        buffer = self._pool.take(one.numel, dtype)
        taken.callback(self._pool.give, buffer)
        return buffer


def _end(piece: Piece, updated: StreamEvent) -> None:
    updated.stream_wait()
    piece.end()


def _offloads(engine: Engine) -> bool:
    """Whether the host keeps optimizer state, or may."""
    return engine.watch.active or any(unit.updated_on_host for unit in engine.units)


def _directions(by_unit: Sequence[WholeUnitOptimizer]) -> bool:
    """Whether owners send directions back; the same for all units, which one class updates."""
    return any(one.finds_directions for one in by_unit)


def _as_now(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Param groups with the settings of this moment: schedules write into a learning rate that is a tensor."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups
    ]


def _whole_slots(optimizer: WholeUnitOptimizer, flags: bytes) -> list[int]:
    return [slot for slot, flag in enumerate(flags) if flag and optimizer.is_whole(slot)]


class UpdateWhole(UpdateAtStep):
    """At step(): tensors of all units in common rounds, and beside them what every rank can update alone."""

    def __init__(
        self,
        engine: Engine,
        by_unit: Sequence[WholeUnitOptimizer],
        ownership: Ownership,
        updates: type[WholeUpdates] = WholeUpdates,
    ) -> None:
        super().__init__(engine, by_unit)
        directions, under_way = _directions(by_unit), self._under_way
        self._whole = by_unit
        self._updates = updates(engine, ownership, self._end_unit, under_way, beside=True, directions=directions)
        self._open: dict[int, ExitStack] = {}  # updates of units, by the unit's id
        self._host = HostGradients(engine) if _offloads(engine) else None

    def reduced(self, index: int, *, final: bool) -> bool:
        return self._host.on_reduced(index, final=final) if self._host is not None else False

    def _update(self, inputs: StepInputs) -> None:
        engine = self._engine
        here: list[int] = []
        offloaded: list[int] = []
        for index in engine.schedule.order:
            on_host = engine.wait_reduced(index).updated_on_host
            if self._whole[index].slots:
                (offloaded if on_host else here).append(index)
        with self._updates.forgotten_after_error():
            if offloaded:
                inputs = self._update_offloaded(offloaded, inputs)
            for unit in (engine.units[index] for index in offloaded):
                self._gathers += unit.gather_updated() if unit.gathers_updated else []
            self._update_here(here, inputs)

    def _update_here(self, indices: Sequence[int], inputs: StepInputs) -> None:
        """Updates units whose state is on the device."""
        engine, updates, flags = self._engine, self._updates, dict[int, bytes]()
        for index in indices:
            unit, optimizer = engine.units[index], self._whole[index]
            unit.flat_params.wait_for_update()  # of a step before, without a forward between them
            unit.gradients.bring_back()
            flags[index] = optimizer.to_update(engine.used.to_update_of(index))
            self._open[id(unit)] = ExitStack()
            self._open[id(unit)].enter_context(unit.update(flags[index]))
        shared = {index: updates.shared(self._whole[index], flags[index]) for index in indices}
        updates.add([one for tensors in shared.values() for one in tensors], "", inputs)
        for index in indices:  # meanwhile the first rounds travel
            updates.update_alone(self._whole[index], flags[index], inputs)
            if not shared[index]:
                self._end_unit(engine.units[index])
        updates.rounds.drain()

    def _end_unit(self, unit: Unit) -> None:
        """A unit is updated: if its parameters are replicated, they travel while others are updated."""
        if unit.updated_on_host:
            return
        self._open.pop(id(unit)).close()
        if unit.gathers_updated:
            self._gathers += unit.gather_updated()

    def _update_offloaded(self, indices: Sequence[int], inputs: StepInputs) -> StepInputs:
        """Updates units whose state the host keeps, one after the other: in memory is the state of one. The inputs,
        with a clipping factor that the host knows."""
        engine, host = self._engine, self._host
        assert host is not None
        engine.tiers.load_for_reading(None)
        inputs = inputs._replace(clip=float(inputs.clip))
        for index in indices:
            engine.units[index].flat_params.check_no_user_writes()  # may raise: before any unit is updated
        for index in indices:
            unit, optimizer = engine.units[index], self._whole[index]
            host.offload(index)
            flags = optimizer.to_update(engine.used.to_update_of(index))
            with unit.state_in_memory(write=True), unit.update(flags):
                self._updates.update_now(optimizer, flags, inputs)
        return inputs


class UpdateWholeInBackward(UpdateInBackward):
    """In backward: the tensors of a unit are sent to their owners as soon as its gradient is reduced, and updated when
    the next unit is reduced, or at the end: meanwhile they travel. Units whose state the host or a file keeps are
    updated at once, since in memory is the state of one."""

    def __init__(
        self, engine: Engine, by_unit: Sequence[WholeUnitOptimizer], groups: list[dict[str, Any]], ownership: Ownership
    ) -> None:
        super().__init__(engine, by_unit, groups, None)
        directions, under_way = _directions(by_unit), self._under_way
        self._whole = by_unit
        self._updates = WholeUpdates(
            engine, ownership, self._unit_ended, under_way, beside=False, directions=directions
        )
        self._open: dict[int, ExitStack] = {}  # updates of units, by the unit's id

    def _on_host(self, index: int) -> bool:
        return False

    def _update_unit(self, index: int) -> None:
        inputs = StepInputs(_as_now(self._groups), 1.0, 1.0, None)  # also for what ends in step()
        optimizer, updates = self._whole[index], self._updates
        unit, flags = optimizer.unit, optimizer.to_update(self._engine.used.to_update_of(index))
        with updates.forgotten_after_error(), span("update", "inside", unit.name):
            if unit.updated_on_host:
                updates.rounds.drain()
                unit.flat_params.check_no_user_writes()
                with unit.update(), unit.state_in_memory(write=True):
                    updates.update_now(optimizer, flags, inputs)
                self._end_unit(unit)
                return
            self._open[id(unit)] = ExitStack()
            self._open[id(unit)].enter_context(unit.update())
            rounds = updates.add(updates.shared(optimizer, flags), f"{unit.name}, ", inputs)
            updates.update_alone(optimizer, flags, inputs)
            updates.rounds.update_all_but(rounds)
            if not rounds:
                self._unit_ended(unit)

    def _unit_ended(self, unit: Unit) -> None:
        if not unit.updated_on_host:
            self._open.pop(id(unit)).close()
            self._end_unit(unit)

    def _finish_updates(self) -> None:
        with self._updates.forgotten_after_error():
            self._updates.rounds.drain()
