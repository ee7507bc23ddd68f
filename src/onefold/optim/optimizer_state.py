"""Optimizer state by parameter: read by element range for a checkpoint, and loaded from one.

The run that wrote a checkpoint may have had other units and other shards. State vectors (moments) follow their
elements; single values (step counts) belong to a parameter, and neighbouring parameters with different single values
become separate optimizer parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import ALIGN, Span
from onefold.model.element_order import Order
from onefold.optim.elementwise import first_state
from onefold.optim.kernels.codec import from_8bit
from onefold.optim.kernels.rule import MOMENTS, SCALE, STORED
from onefold.optim.kernels.small import Moment
from onefold.optim.unit_optimizer import NOT_SETTINGS, OptimizerParam, UnitOptimizer, runs_of
from onefold.optim.whole_unit_optimizer import WholeUnitOptimizer


class ParamState(NamedTuple):
    """The optimizer state of one parameter of a unit, as far as this rank has it."""

    slot: int
    elements: Span  # of the parameter, from this rank's first along "tp" on; others' too if it owns the whole tensor
    vectors: dict[str, Tensor]  # over these elements
    singles: dict[str, Any]  # the same on all ranks
    read: Callable[[str], Tensor]  # a vector by its name, while the unit's state is in memory
    scales: Mapping[str, Tensor] = MappingProxyType({})  # of vectors in 8 bits, by their names: one for each block
    others: Mapping[str, Tensor] = MappingProxyType({})  # of other shapes, which one rank has


class Codes(NamedTuple):
    """Elements of a vector in 8 bits, and the scales of their blocks."""

    codes: Tensor
    scales: Tensor


class NewState(NamedTuple):
    """Optimizer state to load for one parameter."""

    vectors: tuple[str, ...]
    singles: dict[str, Any]
    fill: Callable[[str, Span, Tensor], None]  # (vector's name, elements of the parameter, target)
    codes: Callable[[str, Span], Codes | None] = lambda *_: None  # those elements, if they are in 8 bits
    others: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})  # tensors of other shapes

    def form(self) -> str:
        """Equal for parameters whose state may share one optimizer parameter."""
        return repr((sorted(self.vectors), sorted((key, _bare(value)) for key, value in self.singles.items())))


BLANK = NewState((), {}, lambda *_: None)


def states_of(optimizer: UnitOptimizer, span: Span) -> Iterator[ParamState]:
    """The optimizer state of each parameter that has been updated, clipped to these elements of the unit."""
    if isinstance(optimizer, WholeUnitOptimizer):
        yield from _whole_states(optimizer, span)
        yield from states_of(optimizer.rest, span) if optimizer.rest is not None else ()
    for piece in optimizer.optimizer_params():
        state = optimizer.inner.state.get(piece.tensor, {}) if optimizer.inner is not None else {}
        for slot in piece.slots if state else ():
            place = optimizer.unit.layout.slots[slot]
            part = place.span.clip(piece.span).clip(span)
            at = part.shift(-piece.span.start)
            vectors = {k: v[at.start : at.stop] for k, v in state.items() if _is_vector(v, piece)}
            blocks = slice(at.start // ALIGN, -(-at.stop // ALIGN))
            scales = {k: state[k + SCALE][blocks] for k in vectors if k + SCALE in state}
            singles = {k: v for k, v in state.items() if not _is_vector(v, piece) and not k.endswith(SCALE)}

            def read(key: str, state: dict[str, Any] = state, at: Span = at) -> Tensor:
                return state[key][at.start : at.stop]

            if part.numel:
                yield ParamState(slot, part.shift(-place.start), vectors, singles, read, scales)


def load_states(optimizer: UnitOptimizer, new: dict[int, NewState], groups: list[dict[str, Any]]) -> None:
    """Loads optimizer state for some parameters of a unit, by slot; the others keep theirs. `groups` are the
    Optimizer's param groups."""
    with optimizer.unit.state_in_memory(write=True):
        if isinstance(optimizer, WholeUnitOptimizer):
            _load_whole(optimizer, new)
            if optimizer.rest is not None:
                _load_states(optimizer.rest, new, groups)
        else:
            _load_states(optimizer, new, groups)


def _whole_states(optimizer: WholeUnitOptimizer, span: Span) -> Iterator[ParamState]:
    """The state of tensors that this rank owns; where all ranks of "shard" own the same, clipped to these elements of
    the unit."""
    for owned in optimizer.owned():
        order, state, every = optimizer.order(owned.slot), owned.state, Span(0, optimizer.order(owned.slot).numel)
        at = _share(optimizer, owned.slot, span) if optimizer.replicated else every
        vectors = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == order.shape and v.ndim}
        flat = {k: _flat(order, v)[at.start : at.stop] for k, v in vectors.items()}

        def read(key: str, state: dict[str, Any] = state, order: Order = order, at: Span = at) -> Tensor:
            return order.vector(state[key])[at.start : at.stop]

        if state and at.numel:
            others = {k: v for k, v in state.items() if k not in vectors and isinstance(v, Tensor) and v.ndim}
            singles = {k: v for k, v in state.items() if k not in vectors and k not in others}
            elements = at.shift(-optimizer.first(owned.slot))
            others = others if at.start == 0 else {}
            yield ParamState(owned.slot, elements, flat, singles, read, {}, others)


def _flat(order: Order, tensor: Tensor) -> Tensor:
    """A state's tensor as a vector; the placeholder of one that is only in a file stays one."""
    return order.vector(tensor) if any(tensor.stride()) else tensor.reshape(-1)


def _share(optimizer: WholeUnitOptimizer, slot: int, span: Span) -> Span:
    """The elements of a tensor that are among these of the unit; if it is split over "tp", as large a share of them."""
    place, body = optimizer.unit.layout.slots[slot], optimizer.unit.layout.body
    if not optimizer.is_shared(slot):
        return place.span.clip(span).shift(-place.start)
    numel, part = optimizer.order(slot).numel, span.clip(body)
    return Span(numel * part.start // body.numel, numel * part.stop // body.numel)


def _load_whole(optimizer: WholeUnitOptimizer, new: dict[int, NewState]) -> None:
    for owned in optimizer.owned():
        if (state := new.get(owned.slot)) is None:
            continue
        like, made = optimizer.like(owned.slot), dict[str, Any]()
        order, first = optimizer.order(owned.slot), optimizer.first(owned.slot)
        for key in state.vectors:
            dtype, device = like.get(key, (optimizer.unit.master.dtype, optimizer.device))
            vector = torch.empty(order.numel, dtype=dtype, device=device)
            state.fill(key, Span(-first, order.numel - first), vector)
            made[key] = order.in_memory(vector)
        for key, value in state.singles.items():
            made[key] = value.to(like.get(key, (None, "cpu"))[1], copy=True) if isinstance(value, Tensor) else value
        for key, read in state.others.items():
            other = read()
            dtype, device = like.get(key, (other.dtype, optimizer.device))
            made[key] = other.to(device, dtype)
        optimizer.replace_state(owned.slot, made)


def _load_states(optimizer: UnitOptimizer, new: dict[int, NewState], groups: list[dict[str, Any]]) -> None:
    old = {state.slot: _as_new(state) for state in states_of(optimizer, optimizer.unit.master.owned)}
    states = {**old, **new}
    for group in optimizer.group_numbers:
        settings = {key: value for key, value in groups[group].items() if key not in NOT_SETTINGS}
        like = first_state(optimizer.cls, optimizer.kwargs, settings, optimizer.device, optimizer.unit.master.dtype)
        if optimizer.fused(settings) or optimizer.small(settings):  # Onefold's kernels count steps on the host
            like = {
                key: value.cpu() if isinstance(value, Tensor) and not value.ndim else value
                for key, value in like.items()
            }
        slots = sorted(slot for piece in optimizer.by_group[group] for slot in piece.slots)
        cuts = [
            optimizer.make_param(tuple(alike))
            for run in runs_of(slots)
            for _, alike in groupby(run, key=lambda slot: states.get(slot, BLANK).form())
        ]
        filled = [_filled(optimizer, cut, [states.get(slot, BLANK) for slot in cut.slots], like) for cut in cuts]
        optimizer.replace(group, cuts, filled)


def _filled(
    optimizer: UnitOptimizer, cut: OptimizerParam, states: list[NewState], like: dict[str, Any]
) -> dict[str, Any]:
    """The state of one optimizer parameter, made from that of its parameters; padding is zero. `like` has the dtypes
    and devices."""
    made: dict[str, Any] = {}
    for key in states[0].vectors:
        small = key in MOMENTS and optimizer.form.small
        dtype = like[key].dtype if isinstance(like.get(key), Tensor) else optimizer.unit.master.dtype
        dtype = STORED[optimizer.form.name] if small else dtype
        made[key] = torch.zeros(cut.span.numel, dtype=dtype, device=optimizer.device)
        if small and optimizer.form.name == "8bit":
            made[key + SCALE] = torch.zeros(cut.span.numel // ALIGN, dtype=dtype, device=optimizer.device)
        for slot, state in zip(cut.slots, states, strict=True):
            place = optimizer.unit.layout.slots[slot]
            part = place.span.clip(cut.span)
            at, elements = part.shift(-cut.span.start), part.shift(-place.start)
            if small:
                moment = Moment(made[key], made.get(key + SCALE), bool(MOMENTS[key])).at(at)
                _fill_small(moment, state, key, elements)
            else:
                state.fill(key, elements, made[key][at.start : at.stop])
    singles = states[0].singles
    if optimizer.cls is torch.optim.SGD and not optimizer.form.small:
        singles = {key: value for key, value in singles.items() if key != "step"}  # only small forms count
    for key, value in singles.items():
        if isinstance(value, Tensor):
            value = value.to(like[key].device if isinstance(like.get(key), Tensor) else "cpu", copy=True)
        made[key] = value
    return {key: made[key] for key in sorted(made, key=list(like | made).index)}  # in the order of the wrapped class


def _fill_small(moment: Moment, state: NewState, key: str, elements: Span) -> None:
    """Fills some elements of a moment: with the codes themselves if the state has them, else rounded to the nearest."""
    if not elements.numel:
        return
    found = state.codes(key, elements) if moment.scales is not None else None
    if found is None:
        wide = torch.empty(elements.numel, device=moment.codes.device)
        state.fill(key, elements, wide)
        moment.round_from(wide, None)
    elif moment.scales is not None:
        moment.codes.copy_(found.codes)
        moment.scales.copy_(found.scales)


def _as_new(state: ParamState) -> NewState:
    def codes(key: str, elements: Span) -> Codes | None:
        at = elements.shift(-state.elements.start)
        if key not in state.scales:
            return None
        blocks = slice(at.start // ALIGN, -(-at.stop // ALIGN))
        return Codes(state.vectors[key][at.start : at.stop], state.scales[key][blocks])

    def fill(key: str, elements: Span, out: Tensor) -> None:
        at, found = elements.shift(-state.elements.start), codes(key, elements)
        out.copy_(state.vectors[key][at.start : at.stop] if found is None else decoded(key, found))

    return NewState(tuple(state.vectors), state.singles, fill, codes)


def decoded(key: str, found: Codes) -> Tensor:
    """The fp32 values of a moment in 8 bits."""
    return from_8bit(*found, second=bool(MOMENTS[key]))


def _is_vector(value: Any, piece: OptimizerParam) -> bool:
    return isinstance(value, Tensor) and value.shape == (piece.span.numel,)


def _bare(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
