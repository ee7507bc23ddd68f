"""What the wrapped optimizer class sees of one unit: a few long vectors, cut only where parameters diverge.

The elements this rank updates (its shard, or all where the optimizer is whole) are *slices*: neighbours of one param
group are one vector, so a unit costs one fused kernel. A slice is cut when some of its parameters were used by a rank
and some by none; its state is cut with it, and an unused parameter keeps its values, its moments and its step count.
Every slice starts and ends on a full vector, so cutting changes no bit of any update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from onefold.cost.layout import Span
from onefold.cost.states import StateCost
from onefold.errors import StateError
from onefold.offload.transfer import GradientTransfer
from onefold.optim.elementwise import bare_step
from onefold.optim.kernels.fused import fits, update
from onefold.optim.kernels.rule import KNOWN, next_step, take_back_count
from onefold.optim.kernels.update import fits as fits_cpu
from onefold.optim.kernels.update import update as update_on_cpu
from onefold.state.master import NarrowMaster
from onefold.state.unit import Unit

NOT_SETTINGS = ("params", "param_names")  # of a param group


class OptimizerParam(NamedTuple):
    """Neighbouring parameters of one group, as one vector."""

    span: Span  # in the unit
    slots: tuple[int, ...]  # which of the unit's parameters it holds, wholly or in part
    tensor: nn.Parameter


class UnitOptimizer:
    """The wrapped class, on the part of one unit that this rank updates."""

    def __init__(self, unit: Unit, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> None:
        self.unit, self._pool = unit, unit.pool
        self._lends = unit.dtypes.narrow or unit.updated_on_host  # what is updated is not the values that compute sees
        unit.more_state = self.state_tensors
        self.cls, self.kwargs = cls, kwargs
        self._lent: list[Tensor] = []
        self.threads: int | None = None  # of the CPU's kernel; None: as many as torch uses
        self.native = True  # may use the CPU's kernel; no, if another rank has none
        self._transfer: GradientTransfer | None = None
        self._in_one_kernel: list[OptimizerParam] = []  # in the last update
        # what a slice holds while no master is lent to it
        self._nothing = torch.empty(0, dtype=unit.master.dtype, device=unit.pool.device)
        self.slices: dict[int, list[OptimizerParam]] = {}  # group -> slices, in order
        self.inner: torch.optim.Optimizer | None = None
        self.group_numbers: list[int] = []  # of the inner optimizer's param groups

    def add_group(self, group: int, slots: Iterable[int]) -> None:
        """Some of the unit's parameters belong to this group."""
        slices = [piece for run in runs_of(sorted(slots)) if (piece := self._slice(run))]
        if not slices:
            return
        self.slices[group] = slices
        if self._lends and self.cls not in KNOWN:  # it may make its state at once, in the shape of what it sees
            with self.unit.state_in_memory(write=self.unit.image is not None):
                for piece in slices:
                    piece.tensor.data = self.unit.master.open(piece.span)
                self._add_inner(group, slices)
                for piece in slices:
                    self._take_back(piece)
        else:
            self._add_inner(group, slices)

    def _add_inner(self, group: int, slices: list[OptimizerParam]) -> None:
        inner_group = {"params": [piece.tensor for piece in slices]}
        if self.inner is None:
            self.inner = self.cls([inner_group], **self.kwargs)
        else:
            self.inner.add_param_group(inner_group)
        self.group_numbers.append(group)

    def update(
        self,
        groups: list[dict[str, Any]],
        kept: Sequence[int],
        factor: float | Tensor,
        bad: Tensor | None = None,
        transfer: GradientTransfer | None = None,
    ) -> None:
        """Step the slices that are kept (a flag for each parameter of the unit) with the hyperparameters of the outer
        groups; 16-bit gradients are times `factor`. Where one kernel does it all, `bad` on the device keeps it from
        writing anything. The gradient is what was reduced, or a transfer of it."""
        if self.inner is None:
            return
        self._transfer = transfer
        used: list[OptimizerParam] = []
        self._in_one_kernel = []
        for inner_group, group in zip(self.inner.param_groups, self.group_numbers, strict=True):
            self._part(group, inner_group, kept)
            inner_group.update((key, value) for key, value in groups[group].items() if key not in NOT_SETTINGS)
            for piece in self.slices[group]:
                if kept[piece.slots[0]] and self.fused(inner_group):
                    self._in_one_kernel.append(piece)
                    self._update_fused(piece, inner_group, factor, bad)
                elif kept[piece.slots[0]]:
                    used.append(piece)
                    self._lend(piece, factor)
        if used:
            bare_step(self.inner)
        for piece in used:
            self._take_back(piece)
        while self._lent:
            self._pool.give(self._lent.pop())
        self._transfer = None

    def covers(self, kept: Sequence[int]) -> bool:
        """Whether an update writes all that this rank owns."""
        used = [piece for piece in self.optimizer_params() if all(kept[slot] for slot in piece.slots)]
        return sum(piece.span.numel for piece in used) == self.unit.master.owned.numel

    def _gradient(self, span: Span) -> list[tuple[Span, Tensor]]:
        """In one vector, or as autograd has left it."""
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
        """Whether one kernel does the update of a slice."""
        if not self.unit.dtypes.narrow:
            return False
        return fits(self.cls, group, self.device) or (self.native and fits_cpu(self.cls, group, self.device))

    def _update_fused(
        self, piece: OptimizerParam, group: dict[str, Any], factor: float | Tensor, bad: Tensor | None
    ) -> None:
        assert self.inner is not None and isinstance(self.unit.master, NarrowMaster)
        rule = next_step(self.cls, group, self.inner.state[piece.tensor], piece.span.numel, self.device)
        for span, grad in self._gradient(piece.span):
            at, (copy, master) = span.shift(-piece.span.start), self.unit.master.parts(span)
            if self.device.type == "cpu":
                threads = self.threads or torch.get_num_threads()
                update_on_cpu(rule.at(at.start, at.stop), grad, copy, master, float(factor), threads)
            else:
                update(rule.at(at.start, at.stop), grad, copy, master, factor, bad)

    def not_taken(self) -> None:
        """The device refused the last update: it does not count."""
        assert self.inner is not None
        for piece in self._in_one_kernel:
            take_back_count(self.inner.state[piece.tensor])

    def _lend(self, piece: OptimizerParam, factor: float | Tensor) -> None:
        """Let the inner optimizer see values and gradient of a slice, in the dtype it works in."""
        pieces, narrow = self._gradient(piece.span), self.unit.dtypes.narrow
        if self._lends:
            piece.tensor.data = self.unit.master.open(piece.span)
        if narrow or factor != 1.0:  # in fp32: a product with a 16-bit vector would be rounded to 16 bits
            wide = self._pool.take(piece.span.numel, torch.float32 if narrow else pieces[0][1].dtype)
            self._lent.append(wide)
            if sum(grad.numel() for _, grad in pieces) < wide.numel():
                wide.zero_()  # behind each parameter
            for span, grad in pieces:
                wide[span.start - piece.span.start : span.stop - piece.span.start].copy_(grad)
            piece.tensor.grad = wide if isinstance(factor, float) and factor == 1.0 else wide.mul_(factor)
        else:
            [(_, piece.tensor.grad)] = pieces

    def _take_back(self, piece: OptimizerParam) -> None:
        piece.tensor.grad = None
        if self._lends:
            wide, piece.tensor.data = piece.tensor.data, self._nothing
            self.unit.master.close(piece.span, wide)

    def _slice(self, slots: tuple[int, ...]) -> OptimizerParam | None:
        layout = self.unit.layout
        owned = self.unit.master.owned
        inside = tuple(i for i in slots if layout.slots[i].padded_span.clip(owned).numel)
        if not inside:
            return None
        whole = Span(layout.slots[inside[0]].padded_span.start, layout.slots[inside[-1]].padded_span.stop)
        span = whole.clip(owned)
        values = self._nothing if self._lends else self.unit.flat_params.part(span)
        return OptimizerParam(span, inside, nn.Parameter(values))

    def _part(self, group: int, inner_group: dict[str, Any], kept: Sequence[int]) -> None:
        """Cut slices whose parameters diverge, and their state with them."""
        if all(len({kept[slot] for slot in piece.slots}) == 1 for piece in self.slices[group]):
            return
        assert self.inner is not None
        parted = []
        for piece in self.slices[group]:
            runs = [tuple(run) for _, run in groupby(piece.slots, key=lambda slot: kept[slot])]
            cuts = [piece] if len(runs) == 1 else [cut for run in runs if (cut := self._slice(run))]
            if len(runs) > 1 and (state := self.inner.state.pop(piece.tensor, None)):
                for cut in cuts:
                    at, numel = cut.span.shift(-piece.span.start), piece.span.numel
                    self.inner.state[cut.tensor] = {key: _cut(value, numel, at) for key, value in state.items()}
            parted += cuts
        self.slices[group] = parted
        inner_group["params"] = [piece.tensor for piece in parted]

    def optimizer_params(self) -> Iterator[OptimizerParam]:
        for group in self.group_numbers:
            yield from self.slices[group]

    def state_tensors(self) -> list[Tensor]:
        states = [dict(state) for state in self.inner.state.values()] if self.inner is not None else []
        return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]

    def planned_state(self, cost: StateCost) -> tuple[int, int]:
        """Of the slices that have been updated at least once: bytes of vectors, and of step counts."""
        assert self.inner is not None or not self.slices
        live = [
            piece for piece in self.optimizer_params() if self.inner is not None and self.inner.state.get(piece.tensor)
        ]
        return sum(piece.span.numel for piece in live) * cost.per_element, len(live) * cost.per_tensor

    def state_dict(self) -> list[dict[str, Any]]:
        with self.unit.state_in_memory():
            return self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for piece in self.optimizer_params():
            assert self.inner is not None
            state = dict(self.inner.state.get(piece.tensor, {}))
            if self.unit.image is not None:  # they will rest again
                state = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in state.items()}
            rows.append({"unit": self.unit.name, "slots": piece.slots, "span": tuple(piece.span), "state": state})
        return rows

    def load(self, rows: list[dict[str, Any]]) -> None:
        """Take back slices and their state; the cuts are the saved ones."""
        with self.unit.state_in_memory(write=True):
            self._load(rows)

    def _load(self, rows: list[dict[str, Any]]) -> None:
        for group in self.group_numbers:
            slots = [slot for piece in self.slices[group] for slot in piece.slots]
            mine = [row for row in rows if set(row["slots"]) <= set(slots)]
            if sorted(slot for row in mine for slot in row["slots"]) != sorted(slots):
                raise StateError(
                    f"the saved optimizer state does not cover unit {self.unit.name}; is it of this model?"
                )
            copies = [{k: tree_map_only(Tensor, Tensor.clone, v) for k, v in row["state"].items()} for row in mine]
            self.replace(group, [self.cut(tuple(row["slots"])) for row in mine], copies)

    def replace(self, group: int, cuts: list[OptimizerParam], states: list[dict[str, Any]]) -> None:
        """Other slices of the same parameters, with their state."""
        assert self.inner is not None
        for piece in self.slices[group]:
            self.inner.state.pop(piece.tensor, None)
        self.inner.state.update((cut.tensor, state) for cut, state in zip(cuts, states, strict=True) if state)
        self.slices[group] = cuts
        self.inner.param_groups[self.group_numbers.index(group)]["params"] = [cut.tensor for cut in cuts]

    def cut(self, slots: tuple[int, ...]) -> OptimizerParam:
        """A slice of neighbours of which this rank has something."""
        piece = self._slice(slots)
        assert piece is not None
        return piece


def runs_of(slots: list[int]) -> list[tuple[int, ...]]:
    """Neighbours together: [0, 1, 3] -> (0, 1), (3,)."""
    keyed = groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0])
    return [tuple(slot for _, slot in run) for _, run in keyed]


def _cut(state: Any, numel: int, at: Span) -> Any:
    """The part of some state that belongs to these elements; counts are copied."""

    def cut(value: Tensor) -> Tensor:
        return value[at.start : at.stop] if value.shape == (numel,) else value.clone()

    return tree_map_only(Tensor, cut, state)
