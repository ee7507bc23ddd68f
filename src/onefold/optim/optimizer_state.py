"""Optimizer state by parameter: read by element range for a checkpoint, and loaded from one.

The run that wrote a checkpoint may have had other units and other shards. State vectors (moments) follow their
elements; single values (step counts) belong to a parameter, and neighbouring parameters with different single values
become separate optimizer parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.optim.elementwise import first_state
from onefold.optim.unit_optimizer import NOT_SETTINGS, OptimizerParam, UnitOptimizer, runs_of


class ParamState(NamedTuple):
    """The optimizer state of one parameter of a unit, as far as this rank has it."""

    slot: int
    elements: Span  # of the parameter
    vectors: dict[str, Tensor]  # over these elements
    singles: dict[str, Any]  # the same on all ranks
    read: Callable[[str], Tensor]  # a vector by its name, while the unit's state is in memory


class NewState(NamedTuple):
    """Optimizer state to load for one parameter."""

    vectors: tuple[str, ...]
    singles: dict[str, Any]
    fill: Callable[[str, Span, Tensor], None]  # (vector's name, elements of the parameter, target)

    def form(self) -> str:
        """Equal for parameters whose state may share one optimizer parameter."""
        return repr((sorted(self.vectors), sorted((key, _bare(value)) for key, value in self.singles.items())))


BLANK = NewState((), {}, lambda *_: None)


def states_of(optimizer: UnitOptimizer, span: Span) -> Iterator[ParamState]:
    """The optimizer state of each parameter that has been updated, clipped to these elements of the unit."""
    for piece in optimizer.optimizer_params():
        state = optimizer.inner.state.get(piece.tensor, {}) if optimizer.inner is not None else {}
        for slot in piece.slots if state else ():
            place = optimizer.unit.layout.slots[slot]
            part = place.span.clip(piece.span).clip(span)
            at = part.shift(-piece.span.start)
            vectors = {k: v[at.start : at.stop] for k, v in state.items() if _is_vector(v, piece)}
            singles = {k: v for k, v in state.items() if not _is_vector(v, piece)}

            def read(key: str, state: dict[str, Any] = state, at: Span = at) -> Tensor:
                return state[key][at.start : at.stop]

            if part.numel:
                yield ParamState(slot, part.shift(-place.start), vectors, singles, read)


def load_states(optimizer: UnitOptimizer, new: dict[int, NewState], groups: list[dict[str, Any]]) -> None:
    """Loads optimizer state for some parameters of a unit, by slot; the others keep theirs. `groups` are the
    Optimizer's param groups."""
    with optimizer.unit.state_in_memory(write=True):
        _load_states(optimizer, new, groups)


def _load_states(optimizer: UnitOptimizer, new: dict[int, NewState], groups: list[dict[str, Any]]) -> None:
    old = {state.slot: _as_new(state) for state in states_of(optimizer, optimizer.unit.master.owned)}
    states = {**old, **new}
    for group in optimizer.group_numbers:
        settings = {key: value for key, value in groups[group].items() if key not in NOT_SETTINGS}
        like = first_state(optimizer.cls, optimizer.kwargs, settings, optimizer.device, optimizer.unit.master.dtype)
        if optimizer.fused(settings):  # Onefold's kernels count steps on the host
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
        dtype = like[key].dtype if isinstance(like.get(key), Tensor) else optimizer.unit.master.dtype
        made[key] = torch.zeros(cut.span.numel, dtype=dtype, device=optimizer.device)
        for slot, state in zip(cut.slots, states, strict=True):
            place = optimizer.unit.layout.slots[slot]
            part = place.span.clip(cut.span)
            at = part.shift(-cut.span.start)
            state.fill(key, part.shift(-place.start), made[key][at.start : at.stop])
    for key, value in states[0].singles.items():
        if isinstance(value, Tensor):
            value = value.to(like[key].device if isinstance(like.get(key), Tensor) else "cpu", copy=True)
        made[key] = value
    return {key: made[key] for key in sorted(made, key=list(like | made).index)}  # in the order of the wrapped class


def _as_new(state: ParamState) -> NewState:
    def fill(key: str, elements: Span, out: Tensor) -> None:
        at = elements.shift(-state.elements.start)
        out.copy_(state.vectors[key][at.start : at.stop])

    return NewState(tuple(state.vectors), state.singles, fill)


def _is_vector(value: Any, piece: OptimizerParam) -> bool:
    return isinstance(value, Tensor) and value.shape == (piece.span.numel,)


def _bare(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
