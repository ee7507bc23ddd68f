"""The unit optimizer of classes that need whole tensors: one wrapped optimizer for each tensor that this rank owns.

The wrapped class sees a tensor in its true shape, also if that is split over the mesh axis "tp". The master stays
sharded as it is for other classes; what an update needs comes to the owner for the update only (update_whole.py).
Optimizer state stays with the owner (ownership.py). Where optimizer state is replicated, every rank owns every tensor
that is not split.

Of Muon, torch's or ours, the owner needs no master: it finds the direction, and each rank moves its own elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from onefold.cost.layout import Span
from onefold.cost.states import StateCost
from onefold.errors import OptimizerError, StateError
from onefold.model.element_order import Order
from onefold.optim.newton_schulz import Move, ReducedGradient, direction_dtype, direction_settings, work_of
from onefold.optim.owned_tensor import OwnedTensor
from onefold.optim.ownership import Ownership, ToOwn
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.whole_trial import StateForm, first_whole_state
from onefold.settings.placement import Scope
from onefold.state.unit import Unit

# of messages: gradients and masters go to owners, updated masters come back; of Muon gradients, and directions back
PURPOSES = GRADIENT, MASTER, UPDATED, DIRECTION = "whole-gradient", "whole-master", "whole-updated", "whole-direction"
Forms = dict[tuple[Any, ...], StateForm]  # by param group, shape, strides and dtype


class WholeUnitOptimizer(UnitOptimizer):
    def __init__(
        self, unit: Unit, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], ownership: Ownership, forms: Forms
    ) -> None:
        super().__init__(unit, cls, kwargs)
        self._ownership, self._forms = ownership, forms
        self._orders: dict[int, Order] = {}  # by slot
        self._owned: dict[int, OwnedTensor] = {}  # by slot
        self._groups: dict[int, int] = {}  # the param group of each tensor, on whatever rank
        self._settings: dict[int, dict[str, Any]] = {}  # of these groups, for tensors that several ranks hold
        self.rest: UnitOptimizer | None = None  # updates other parameters of the unit on shards, with another class

    def detach(self) -> None:
        super().detach()
        self._owned = {}
        if self.rest is not None:
            self.rest.detach()

    def follow_unit(self) -> None:
        super().follow_unit()
        for owned in self._owned.values():
            owned.follow(self.device)
        if self.rest is not None:
            self.rest.follow_unit()

    def add_rest(self, rest: UnitOptimizer) -> None:
        """Another class updates parameters of the unit that are added with `add_to_rest`."""
        self.unit.detach_state(rest.state_tensors)  # they are among the state_tensors of this one
        self.rest = rest

    def add_to_rest(self, group: int, slots: Sequence[int]) -> None:
        assert self.rest is not None
        self.slots.update(slots)
        self.rest.add_group(group, slots)

    def is_whole(self, slot: int) -> bool:
        """Whether a parameter is updated as a whole tensor; else on shards."""
        return slot in self._groups

    # -- who updates what ---------------------------------------------------------------------------------------------

    @property
    def replicated(self) -> bool:
        """Whether optimizer state is replicated over the mesh axis "shard"."""
        return self.unit.placement.optimizer is Scope.REPLICATED

    def name(self, slot: int) -> str:
        return self.unit.layout.slots[slot].name

    def order(self, slot: int) -> Order:
        """The shape of a tensor, without the split over "tp", and the order in which ranks hold its elements."""
        if slot not in self._orders:
            self._orders[slot] = self._ownership.order(self.unit, slot)
        return self._orders[slot]

    def first(self, slot: int) -> int:
        """The number of the first element of a tensor that is this rank's along "tp"."""
        return self._ownership.first(self.order(slot), self.name(slot))

    def size(self, slot: int) -> torch.Size:
        return torch.Size(self.order(slot).shape)

    def is_shared(self, slot: int) -> bool:
        """Whether a tensor is brought together for its update, because several ranks hold pieces of it."""
        return self._ownership.is_shared(self.name(slot))

    def held(self, slot: int) -> Span:
        """The elements of the unit that belong to this tensor and that this rank updates, or would as an element-wise
        class."""
        return self._held_by(slot, self.unit.rank)

    def _held_by(self, slot: int, shard: int) -> Span:
        span = self.unit.layout.slots[slot].span
        return span if self.replicated else span.clip(self.unit.layout.shard(shard))

    def to_own(self, slots: Sequence[int], group: dict[str, Any]) -> list[ToOwn]:
        """Tensors of the unit that need owners."""
        found = []
        for slot in (slot for slot in slots if self.is_shared(slot)):
            self._settings[slot] = group
            settings = direction_settings(self.cls, group)
            size, shards = tuple(self.size(slot)), 1 if self.replicated else self.unit.layout.ranks
            numbered = self.first(slot) - self.unit.layout.slots[slot].start
            held = tuple(self._held_by(slot, shard).shift(numbered) for shard in range(shards))
            work = work_of(size, settings["matrices"]) if settings is not None else None
            split = self._ownership.part(self.name(slot)) is not None
            found.append(ToOwn(self.name(slot), size, work, held, split, self.unit.name))
        return found

    def update_bytes(self, slots: Sequence[int], group: int) -> dict[str, int]:
        """Bytes that the rank that updates a tensor needs at least, by name: for the gradient, the master (of Muon the
        gradient in the master's dtype instead), and state."""
        gradient, master = self.unit.gradients.dtype.itemsize, self.unit.master.dtype.itemsize
        forms = {slot: self._form(slot, group) for slot in slots if self.is_shared(slot)}
        found = {}
        for slot, form in forms.items():
            wide = 3 if self.order(slot).interleaved else 2  # both in the master's dtype, and one in memory order
            vectors = self.size(slot).numel() * (gradient + wide * master)
            found[self.name(slot)] = vectors + form.vector_bytes + form.other_bytes
        return found

    @property
    def finds_directions(self) -> bool:
        """Whether owners send back directions, in which each rank moves its elements; else updated masters."""
        return direction_settings(self.cls, {}) is not None

    def _direction_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        found = direction_settings(self.cls, group)
        assert found is not None
        return found

    def direction_dtype(self, slot: int, group: dict[str, Any]) -> torch.dtype:
        return direction_dtype(tuple(self.size(slot)), self._direction_settings(group), self.unit.master.dtype)

    def sends_master(self, slot: int) -> bool:
        """Whether pieces of the master go to the owner. It has them all if parameters are replicated on its device, not
        rounded from a master, and not split; and it needs none to find a direction."""
        if self.finds_directions:
            return False
        replicated = self.unit.placement.parameters is Scope.REPLICATED
        there = replicated and not self.unit.dtypes.narrow and not self.unit.updated_on_host
        return self._ownership.is_split(self.name(slot)) or not there

    def planned_traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step that updates every tensor, by purpose."""
        shared = [slot for slot in self._groups if self.is_shared(slot)]
        there, back = ((GRADIENT,), DIRECTION) if self.finds_directions else ((GRADIENT, MASTER), UPDATED)
        sent = {} if self.replicated and not shared else dict.fromkeys((*there, back), 0)
        widths = {GRADIENT: self.unit.gradients.dtype.itemsize, MASTER: self.unit.master.dtype.itemsize}
        for slot in shared:
            held = self.held(slot).numel
            if slot in self._owned:
                sent[back] += (self.size(slot).numel() - held) * self._answer_itemsize(slot)
                continue
            for purpose in there:
                sent[purpose] += held * widths[purpose] if purpose == GRADIENT or self.sends_master(slot) else 0
        return sent

    def _answer_itemsize(self, slot: int) -> int:
        """Bytes of each element that the owner sends back."""
        if self.finds_directions:
            return self.direction_dtype(slot, self._settings[slot]).itemsize
        return self.unit.master.dtype.itemsize

    def add_group(self, group: int, slots: Sequence[int]) -> None:
        self.slots.update(slots)
        for slot in slots:
            self._groups[slot] = group
            if not self.is_shared(slot) or self._ownership.of(self.name(slot)) == self._ownership.comm.rank:
                self._owned[slot] = OwnedTensor(slot, self.cls, self.kwargs, self._empty)

    def check_shapes(self, slots: Sequence[int], group: int, settings: dict[str, Any]) -> None:
        """Raises unless the class takes tensors of these shapes; every rank checks all of them, and alike."""
        for slot in slots:
            try:
                self._form(slot, group, settings)
            except Exception as error:
                ours = "; onefold.Muon does both" if self.cls is torch.optim.Muon else ""
                raise OptimizerError(
                    f"{self.cls.__name__} cannot update {self.name(slot)} of shape {tuple(self.size(slot))}: {error}. "
                    f"Name the parameters it takes with groups=, and give the others to a second Optimizer, such as "
                    f"AdamW{ours}"
                ) from error

    def _form(self, slot: int, group: int | None = None, settings: dict[str, Any] | None = None) -> StateForm:
        size, stride, dtype = *self.order(slot)[:2], self.unit.master.dtype
        key = self._groups[slot] if group is None else group, size, stride, dtype
        if key not in self._forms:
            assert settings is not None
            self._forms[key] = first_whole_state(self.cls, self.kwargs, settings, size, stride, dtype, self.device)
        return self._forms[key]

    # -- updates ------------------------------------------------------------------------------------------------------

    def update_whole(
        self, slot: int, master: Tensor, gradient: Tensor, group: dict[str, Any], bad: Tensor | None
    ) -> None:
        """Updates one tensor that this rank owns in place; `master` and `gradient` are vectors in memory order. Nothing
        changes if the device flag `bad` is set."""
        order = self.order(slot)
        self._owned[slot].update(order.full(master), order.full(gradient), group, bad)

    def find_direction(
        self, slot: int, out: Tensor, gradient: ReducedGradient, group: dict[str, Any], bad: Tensor | None
    ) -> None:
        """Updates the state of one tensor that this rank owns, and writes the direction in which the tensor is to move;
        both vectors are in memory order. The state does not change if the device flag `bad` is set."""
        order = self.order(slot)
        full = gradient._replace(values=order.full(gradient.values))
        self._owned[slot].find_direction(order.full(out), full, group, bad)

    def scales_in_update(self, slot: int, gradient: ReducedGradient, group: dict[str, Any]) -> bool:
        """Whether `find_direction` scales this gradient, a vector as it was reduced, without a copy."""
        order = self.order(slot)
        full = gradient._replace(values=order.full(gradient.values))
        return not order.interleaved and full.fused(self._direction_settings(group))

    def move(self, slot: int, group: dict[str, Any]) -> Move:
        """How the elements of a tensor move along its direction."""
        return Move.of(tuple(self.size(slot)), self._direction_settings(group))

    def group_of(self, slot: int) -> int:
        return self._groups[slot]

    def undo_step(self) -> None:
        for owned in self._owned.values():
            owned.undo_step()
        if self.rest is not None:
            self.rest.undo_step()

    def samples(self) -> list[torch.optim.Optimizer]:
        mine = self.cls([nn.Parameter(torch.empty(1, 1, device=self.device))], **self.kwargs)
        return [mine, *(self.rest.samples() if self.rest is not None else [])]

    # -- state --------------------------------------------------------------------------------------------------------

    def owned(self) -> Iterator[OwnedTensor]:
        return iter(self._owned.values())

    def state_tensors(self) -> list[Tensor]:
        leaves = [leaf for owned in self._owned.values() for leaf in tree_leaves(owned.state)]
        rest = self.rest.state_tensors() if self.rest is not None else []
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + rest

    def planned_state(self, cost_of: Callable[[int], StateCost], *, full: bool = False) -> tuple[int, int]:
        live = [self._form(owned.slot) for owned in self._owned.values() if full or owned.state]
        vectors, others = self.rest.planned_state(cost_of, full=full) if self.rest is not None else (0, 0)
        if full:
            sizes = [form.kept for form in live]
        elif self.unit.image is not None:
            sizes = [form.in_file for form in live]
        else:
            sizes = [(form.vector_bytes, form.other_bytes) for form in live]
        return vectors + sum(size[0] for size in sizes), others + sum(size[1] for size in sizes)

    def _rows(self) -> list[dict[str, Any]]:
        spans = {slot: tuple(self.unit.layout.slots[slot].span) for slot in self._owned}
        return [
            {"unit": self.unit.name, "slots": (slot,), "span": spans[slot], "state": self._kept(owned.state)}
            for slot, owned in self._owned.items()
        ] + (self.rest.state_dict() if self.rest is not None else [])

    def _kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """State that keeps its values when the unit's is unloaded."""
        return state if self.unit.image is None else tree_map_only(Tensor, Tensor.clone, state)

    def _load(self, rows: list[dict[str, Any]]) -> None:
        if self.rest is not None:
            self.rest.load([row for row in rows if set(row["slots"]) <= self.rest.slots])
            rows = [row for row in rows if not set(row["slots"]) <= self.rest.slots]
        if sorted(row["slots"] for row in rows) != sorted((slot,) for slot in self._owned):
            raise StateError(f"the saved optimizer state does not cover unit {self.unit.name}; is it of this model?")
        for row in rows:
            copies = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in row["state"].items()}
            self.replace_state(row["slots"][0], copies)

    def replace_state(self, slot: int, state: dict[str, Any]) -> None:
        """Sets the state of one tensor that this rank owns; an empty one begins again with the next update."""
        size, stride = self.order(slot)[:2]
        like = torch.empty_strided(size, stride, dtype=self.unit.master.dtype, device=self.device)
        self._owned[slot].replace_state(state, like)

    def like(self, slot: int) -> dict[str, tuple[torch.dtype, torch.device]]:
        """The dtype and the device of each tensor of state."""
        return self._form(slot).like
