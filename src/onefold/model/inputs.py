"""Which inputs of a module are cast to the compute dtype: all, none, or those that a Precision names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onefold.errors import ConfigError
from onefold.model.containers import cast_tensors

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CastInputs(NamedTuple):
    """The inputs of a module that are cast: by name, and by position if they are given so. None: all inputs."""

    names: frozenset[str] | None = None
    positions: frozenset[int] = frozenset()

    def cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
        """A call's arguments, with the floating tensors in these inputs cast."""
        if self.names is None:
            return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        cast = tuple(cast_tensors(arg, dtype) if at in self.positions else arg for at, arg in enumerate(args))
        named = {key: cast_tensors(arg, dtype) if key in self.names else arg for key, arg in kwargs.items()}
        return cast, named


def chosen_inputs(forward: Callable[..., Any], chosen: Sequence[str | int]) -> CastInputs:
    """Inputs by name or position: each is meant however a caller gives it. Raises if `forward` has no such input."""
    known = inspect.signature(forward).parameters.values()
    order = [one.name for one in known if one.kind in POSITIONAL]
    keywords = {one.name for one in known if one.kind is inspect.Parameter.KEYWORD_ONLY}
    kinds = {one.kind for one in known}
    names, positions = set[str](), set[int]()
    for one in chosen:
        if isinstance(one, str):
            found = one in order or one in keywords or inspect.Parameter.VAR_KEYWORD in kinds
            names.add(one)
            positions.update([order.index(one)] if one in order else [])
        else:
            found = one < len(order) or inspect.Parameter.VAR_POSITIONAL in kinds
            positions.add(one)
            names.update(order[one : one + 1])
        if not found:
            raise ConfigError(f"cast_inputs={one!r} is no input of forward({', '.join([*order, *sorted(keywords)])})")
    return CastInputs(frozenset(names), frozenset(positions))


def first_name(forward: Callable[..., Any]) -> str:
    """The name of the first input of a block or layer: its hidden states. Empty if it has none that can be given by
    name."""
    try:
        known = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is not Python
        return ""
    return next((one.name for one in known if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD), "")
