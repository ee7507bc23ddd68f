"""The unit optimizer: the wrapped torch optimizer on the elements of one unit that this rank updates.

The wrapped class sees these elements (this rank's shard, or all where optimizer state is replicated) as a few long 1-D
*optimizer parameters*: neighbouring parameters of one param group are one vector, so a unit costs one fused kernel. A
vector is split when some of its parameters got gradients in a step and others did not; its state is split with it, and
an unused parameter keeps its value, its moments and its step count. Every vector starts and ends on a multiple of 64
elements, so splitting changes no bit of any update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from onefold.cost.layout import ALIGN, Span
from onefold.cost.states import StateCost
from onefold.errors import OptimizerError, StateError
from onefold.offload.transfer import GradientTransfer
from onefold.optim.guarded_step import GuardedStep
from onefold.optim.kernels.cpu import fits as fits_cpu
from onefold.optim.kernels.cpu import update as update_on_cpu
from onefold.optim.kernels.cuda import fits, update
from onefold.optim.kernels.rule import KNOWN, SCALE, knows, moments_of, next_step, undo_count
from onefold.optim.kernels.small import SmallStep, moments_in
from onefold.optim.small_state import FP32, StateForm
from onefold.optim.small_update import update_small
from onefold.optim.trials import bare_step
from onefold.state.master import StoredMaster
from onefold.state.random_rounding import keys_of
from onefold.state.unit import Unit

NOT_SETTINGS = ("params", "param_names")  # of a param group
NOT_LOADED = (*NOT_SETTINGS, "matrices")  # the program says what matrices Muon makes of a tensor, not a checkpoint


class OptimizerParam(NamedTuple):
    """Neighbouring parameters of one param group, which the wrapped class updates as one vector."""

    span: Span  # in the unit
    slots: tuple[int, ...]  # the unit's parameters that it holds, completely or in part
    tensor: nn.Parameter


class UnitOptimizer:
    def __init__(
        self, unit: Unit, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], form: StateForm = FP32
    ) -> None:
        self.unit, self.form = unit, form
        self._see_placement()
        unit.attach_state(self.state_tensors)
        self.cls, self.kwargs = cls, kwargs
        self._borrowed: list[Tensor] = []
        self.threads: int | None = None  # of the CPU's update kernel; None: as many as torch uses
        self.native = True  # whether the CPU's update kernel may be used: not if another rank has none
        self._transfer: GradientTransfer | None = None
        self._fused_params: list[OptimizerParam] = []  # updated by one kernel each in the last update
        self._guarded: GuardedStep | None = None  # the step of the wrapped class in the last update, under a flag
        self.slots: set[int] = set()  # of the parameters that it updates, on whatever rank
        self.by_group: dict[int, list[OptimizerParam]] = {}  # param group -> its optimizer parameters
        self.inner: torch.optim.Optimizer | None = None
        self.group_numbers: list[int] = []  # which param group each of the inner optimizer's is

    def _see_placement(self) -> None:
        unit = self.unit
        self._pool = unit.pool
        self._on_master = unit.dtypes.narrow or unit.updated_on_host  # the wrapped class gets vectors of the master
        # the data of an optimizer parameter outside an update, where it is a vector of the master
        self._empty = torch.empty(0, dtype=unit.master.dtype, device=unit.pool.device)

    def follow_unit(self) -> None:
        """The unit's master and optimizer state are on another tier, where they are updated from now on."""
        self._see_placement()
        self._guarded = None
        for piece in self.optimizer_params():
            piece.tensor.data = self._empty if self._on_master else self.unit.flat_params.part(piece.span)
        for group in self.inner.param_groups if self.inner is not None else ():
            if group.get("fused") or group.get("capturable"):  # torch wants step counts beside parameters then
                for param in group["params"]:
                    for value in self.inner.state.get(param, {}).values() if self.inner is not None else ():
                        if isinstance(value, Tensor) and not value.dim():
                            value.data = value.to(self.device)

    @contextmanager
    def state_there(self) -> Iterator[None]:
        """Inside, master and optimizer state are where the unit is updated, also if they are parked."""
        if not self.unit.parked:
            yield
            return
        self.unit.unpark()
        self.follow_unit()
        yield
        with _disable_current_modes():
            self.unit.park()
            self.follow_unit()

    def detach(self) -> None:
        """Frees the state. Nothing is in flight."""
        self.unit.detach_state(self.state_tensors)
        self.inner, self._guarded, self.by_group, self.group_numbers = None, None, {}, []

    def to_update(self, flags: Sequence[int]) -> bytes:
        """Of flags that say which parameters of the unit are to be updated, those of parameters it updates."""
        return bytes(bool(flag) and slot in self.slots for slot, flag in enumerate(flags))

    def add_group(self, group: int, slots: Sequence[int]) -> None:
        """Adds some of the unit's parameters to this param group, which may have others of them."""
        self.slots.update(slots)
        slices = [piece for run in runs_of(sorted(slots)) if (piece := self._make_param(run))]
        if not slices:
            return
        self.by_group[group] = self.by_group.get(group, []) + slices
        if self._on_master and self.cls not in KNOWN:  # a class may make its state at once, and must see true shapes
            with self.unit.state_in_memory(write=self.unit.image is not None):
                for piece in slices:
                    piece.tensor.data = self.unit.master.begin_update(piece.span)
                self._add_inner(group, slices)
                for piece in slices:
                    self._detach(piece)
        else:
            self._add_inner(group, slices)

    def _add_inner(self, group: int, slices: list[OptimizerParam]) -> None:
        inner_group = {"params": [piece.tensor for piece in slices]}
        if self.inner is None:
            self.inner = self.cls([inner_group], **self.kwargs)
        elif group in self.group_numbers:
            made = self.cls([inner_group], **self.kwargs)  # with state, if the class makes it at once
            self.inner.param_groups[self.group_numbers.index(group)]["params"] += inner_group["params"]
            self.inner.state.update(made.state)
            return
        else:
            self.inner.add_param_group(inner_group)
        self.group_numbers.append(group)

    def update(
        self,
        groups: list[dict[str, Any]],
        to_update: Sequence[int],
        factor: float | Tensor,
        bad: Tensor | None = None,
        transfer: GradientTransfer | None = None,
    ) -> None:
        """Updates the parameters `to_update` (a flag for each parameter of the unit) with the settings of the
        Optimizer's param groups; gradients are multiplied by `factor`. Nothing changes if the device flag `bad` is set:
        fused kernels write nothing, and what the wrapped class writes is taken back on the device. The gradient is the
        unit's reduced one, or its `transfer` to the host."""
        if self.inner is None:
            return
        self._transfer = transfer
        used: list[OptimizerParam] = []
        self._fused_params, self._guarded = [], None
        for inner_group, group in zip(self.inner.param_groups, self.group_numbers, strict=True):
            self._split_unused(group, inner_group, to_update)
            inner_group.update((key, value) for key, value in groups[group].items() if key not in NOT_SETTINGS)
            for piece in self.by_group[group]:
                if to_update[piece.slots[0]] and self.small(inner_group):
                    self._fused_params.append(piece)
                    self._update_small(piece, inner_group, factor, bad)
                elif to_update[piece.slots[0]] and self.fused(inner_group):
                    self._fused_params.append(piece)
                    self._update_fused(piece, inner_group, factor, bad)
                elif to_update[piece.slots[0]]:
                    used.append(piece)
                    self._attach(piece, factor)
        if used and bad is None:
            bare_step(self.inner)
        elif used and bad is not None:
            self._guarded = GuardedStep(self.inner, [piece.tensor for piece in used], bad)
        for piece in used:
            self._detach(piece)
        while self._borrowed:
            self._pool.give(self._borrowed.pop())
        self._transfer = None

    def check_settings(self, groups: list[dict[str, Any]]) -> None:
        """Raises if the Optimizer's param groups have settings that the form of the state cannot have."""
        for group in self.group_numbers if self.form.small else ():
            self.small({**self.kwargs, **groups[group]})

    def writes_all(self, to_update: Sequence[int]) -> bool:
        """Whether an update of these parameters writes every element that this rank owns."""
        used = [piece for piece in self.optimizer_params() if all(to_update[slot] for slot in piece.slots)]
        return sum(piece.span.numel for piece in used) == self.unit.master.owned.numel

    def _gradient(self, span: Span) -> list[tuple[Span, Tensor]]:
        """The reduced gradient of these elements: one vector, or the tensors that autograd made, each with its span."""
        gradients = self.unit.gradients
        return (
            gradients.pieces(span)
            if self._transfer is None
            else [(span, gradients.from_transfer(self._transfer, span))]
        )

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def fused(self, group: dict[str, Any]) -> bool:
        """Whether one kernel updates an optimizer parameter of this param group."""
        if not self.unit.dtypes.narrow:
            return False
        return fits(self.cls, group, self.device) or (self.native and fits_cpu(self.cls, group, self.device))

    def _update_fused(
        self, piece: OptimizerParam, group: dict[str, Any], factor: float | Tensor, bad: Tensor | None
    ) -> None:
        assert self.inner is not None and isinstance(self.unit.master, StoredMaster)
        rule = next_step(self.cls, group, self.inner.state[piece.tensor], piece.span.numel, self.device)
        edits = self.unit.may_be_edited
        for span, grad in self._gradient(piece.span):
            at, (copy, master) = span.shift(-piece.span.start), self.unit.master.copy_and_stored(span)
            if self.device.type == "cpu":
                threads = self.threads or torch.get_num_threads()
                update_on_cpu(rule.at(at.start, at.stop), grad, copy, master, float(factor), threads, edits=edits)
            else:
                update(rule.at(at.start, at.stop), grad, copy, master, factor, bad, edits=edits)

    def small(self, group: dict[str, Any]) -> bool:
        """Whether the moments of this param group are in a small form."""
        if not self.form.small or not moments_of(self.cls, group):
            return False
        if not knows(self.cls, group):
            raise OptimizerError(
                f"state={self.form.name!r}: a param group has a setting with which {self.cls.__name__} has no such "
                f"form (amsgrad, maximize, capturable, differentiable or dampening); take it back, or use state='fp32'"
            )
        return True

    def _update_small(
        self, piece: OptimizerParam, group: dict[str, Any], factor: float | Tensor, bad: Tensor | None
    ) -> None:
        """Parameter by parameter: random bits are a function of an element's index in its parameter."""
        assert self.inner is not None
        state = self.inner.state[piece.tensor]
        rule = next_step(self.cls, group, state, piece.span.numel, self.device, self.form.name)
        moments, threads = moments_in(self.cls, group, state), (self.threads or torch.get_num_threads()) * self.native
        for place in (self.unit.layout.slots[slot] for slot in piece.slots):
            keys = keys_of(self.form.seed, place.name, int(state["step"]))
            part = place.span.clip(piece.span)
            for span, grad in self._gradient(part) if part.numel else ():
                at = span.shift(-piece.span.start)
                step = SmallStep(rule, tuple(one.at(at) for one in moments), keys, span.start - place.start)
                update_small(self.unit, span, step, grad, factor, bad, threads)

    def samples(self) -> list[torch.optim.Optimizer]:
        """An optimizer of each class that it runs, for a tensor of one element."""
        return [self.cls([nn.Parameter(torch.empty(1, device=self.device))], **self.kwargs)]

    def undo_step(self) -> None:
        """Takes back the step counts of the last update, in which the device wrote nothing."""
        if self.inner is None:
            return
        for piece in self._fused_params:
            undo_count(self.inner.state[piece.tensor])
        if self._guarded is not None:
            self._guarded.undo()
            self._guarded = None

    def _attach(self, piece: OptimizerParam, factor: float | Tensor) -> None:
        """Gives an optimizer parameter its data and gradient, in the dtype of the update."""
        pieces, narrow = self._gradient(piece.span), self.unit.dtypes.narrow
        if self._on_master:
            if self.unit.may_be_edited:
                self.unit.master.take_changed(piece.span)
            piece.tensor.data = self.unit.master.begin_update(piece.span)
        if narrow or factor != 1.0:  # in fp32: a product with a 16-bit vector would be rounded to 16 bits
            wide = self._pool.take(piece.span.numel, torch.float32 if narrow else pieces[0][1].dtype)
            self._borrowed.append(wide)
            if sum(grad.numel() for _, grad in pieces) < wide.numel():
                wide.zero_()  # the padding behind each parameter
            for span, grad in pieces:
                wide[span.start - piece.span.start : span.stop - piece.span.start].copy_(grad)
            piece.tensor.grad = wide if isinstance(factor, float) and factor == 1.0 else wide.mul_(factor)
        else:
            [(_, piece.tensor.grad)] = pieces

    def _detach(self, piece: OptimizerParam) -> None:
        """Takes data and gradient away from an optimizer parameter; the updated data go to the master."""
        piece.tensor.grad = None
        if self._on_master:
            wide, piece.tensor.data = piece.tensor.data, self._empty
            self.unit.master.end_update(piece.span, wide)

    def _make_param(self, slots: tuple[int, ...]) -> OptimizerParam | None:
        layout = self.unit.layout
        owned = self.unit.master.owned
        inside = tuple(i for i in slots if layout.slots[i].padded_span.clip(owned).numel)
        if not inside:
            return None
        whole = Span(layout.slots[inside[0]].padded_span.start, layout.slots[inside[-1]].padded_span.stop)
        span = whole.clip(owned)
        values = self._empty if self._on_master else self.unit.flat_params.part(span)
        return OptimizerParam(span, inside, nn.Parameter(values))

    def _split_unused(self, group: int, inner_group: dict[str, Any], to_update: Sequence[int]) -> None:
        """Splits optimizer parameters of which only some parameters are updated, and their state with them."""
        if all(len({to_update[slot] for slot in piece.slots}) == 1 for piece in self.by_group[group]):
            return
        assert self.inner is not None
        split = []
        for piece in self.by_group[group]:
            runs = [tuple(run) for _, run in groupby(piece.slots, key=lambda slot: to_update[slot])]
            cuts = [piece] if len(runs) == 1 else [cut for run in runs if (cut := self._make_param(run))]
            if len(runs) > 1 and (state := self.inner.state.pop(piece.tensor, None)):
                for cut in cuts:
                    at, numel = cut.span.shift(-piece.span.start), piece.span.numel
                    blocks = Span(at.start // ALIGN, at.stop // ALIGN)
                    self.inner.state[cut.tensor] = {
                        key: _slice_state(value, *((numel // ALIGN, blocks) if key.endswith(SCALE) else (numel, at)))
                        for key, value in state.items()
                    }
            split += cuts
        self.by_group[group] = split
        inner_group["params"] = [piece.tensor for piece in split]

    def optimizer_params(self) -> Iterator[OptimizerParam]:
        for group in self.group_numbers:
            yield from self.by_group[group]

    def state_tensors(self) -> list[Tensor]:
        states = [dict(state) for state in self.inner.state.values()] if self.inner is not None else []
        return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]

    def planned_state(self, cost_of: Callable[[int], StateCost], *, full: bool = False) -> tuple[int, int]:
        """Bytes of the state vectors and of the step counts, by formula, of what has been updated at least once; with
        `full`, once all of it has been. `cost_of` gives the cost of state by the number of its param group."""
        assert self.inner is not None or not self.by_group
        state = self.inner.state if self.inner is not None else {}
        live = [
            (cost_of(group), piece.span.numel)
            for group, pieces in self.by_group.items()
            for piece in pieces
            if full or state.get(piece.tensor)
        ]
        return sum(cost.vectors(numel) for cost, numel in live), sum(cost.per_tensor for cost, _ in live)

    def state_dict(self) -> list[dict[str, Any]]:
        with self.unit.state_in_memory():
            return self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for piece in self.optimizer_params():
            assert self.inner is not None
            state = dict(self.inner.state.get(piece.tensor, {}))
            if self.unit.image is not None:  # the tensors lose their values when the state is unloaded
                state = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in state.items()}
            rows.append({"unit": self.unit.name, "slots": piece.slots, "span": tuple(piece.span), "state": state})
        return rows

    def load(self, rows: list[dict[str, Any]]) -> None:
        """Loads what `state_dict` gave; optimizer parameters are split as they were then."""
        with self.unit.state_in_memory(write=True):
            self._load(rows)

    def _load(self, rows: list[dict[str, Any]]) -> None:
        for group in self.group_numbers:
            slots = [slot for piece in self.by_group[group] for slot in piece.slots]
            mine = [row for row in rows if set(row["slots"]) <= set(slots)]
            if sorted(slot for row in mine for slot in row["slots"]) != sorted(slots):
                raise StateError(
                    f"the saved optimizer state does not cover unit {self.unit.name}; is it of this model?"
                )
            copies = [{k: tree_map_only(Tensor, Tensor.clone, v) for k, v in row["state"].items()} for row in mine]
            self.replace(group, [self.make_param(tuple(row["slots"])) for row in mine], copies)

    def replace(self, group: int, cuts: list[OptimizerParam], states: list[dict[str, Any]]) -> None:
        """Replaces the optimizer parameters of a param group by other splits of the same parameters, with state."""
        assert self.inner is not None
        for piece in self.by_group[group]:
            self.inner.state.pop(piece.tensor, None)
        self.inner.state.update((cut.tensor, state) for cut, state in zip(cuts, states, strict=True) if state)
        self.by_group[group] = cuts
        self.inner.param_groups[self.group_numbers.index(group)]["params"] = [cut.tensor for cut in cuts]

    def make_param(self, slots: tuple[int, ...]) -> OptimizerParam:
        """An optimizer parameter of neighbouring parameters, of which this rank owns elements."""
        piece = self._make_param(slots)
        assert piece is not None
        return piece


def runs_of(slots: list[int]) -> list[tuple[int, ...]]:
    """Groups consecutive numbers: [0, 1, 3] -> (0, 1), (3,)."""
    keyed = groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0])
    return [tuple(slot for _, slot in run) for _, run in keyed]


def _slice_state(state: Any, numel: int, at: Span) -> Any:
    """The state of these elements: vectors are sliced, step counts copied."""

    def cut(value: Tensor) -> Tensor:
        return value[at.start : at.stop] if value.shape == (numel,) else value.clone()

    return tree_map_only(Tensor, cut, state)
