"""Tensors inside the inputs and outputs of modules: in mappings, sequences, dataclasses and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 3  # levels of unknown objects that are searched for tensors


def as_list(output: Any) -> list[Tensor]:
    """All tensors in a module's output; fast for one tensor, which most modules return."""
    return [output] if isinstance(output, Tensor) else list(tensors_in(output))


def tensors_in(output: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in an object. Each container is searched once, since some contain themselves."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        values: Iterable[Any] = output.values()
    elif isinstance(output, list | tuple):
        values = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, f.name) for f in dataclasses.fields(output)]
    elif depth < MAX_DEPTH and hasattr(output, "__dict__") and not isinstance(output, type | nn.Module):
        values, depth = vars(output).values(), depth + 1  # an object of the user's own
    else:
        return
    seen = set() if seen is None else seen
    if id(output) not in seen:
        seen.add(id(output))
        for value in values:
            yield from tensors_in(value, depth, seen)


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """The object with its floating tensors cast. A container in which nothing changes stays the same object, others are
    copied."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        changed = {key: cast for key, value in tree.items() if (cast := cast_tensors(value, dtype)) is not value}
        if not changed:
            return tree
        fresh = copy.copy(tree)
        fresh.update(changed)  # type: ignore[attr-defined]
        return fresh
    if isinstance(tree, list | tuple):
        cast_all = [cast_tensors(value, dtype) for value in tree]
        if all(new is old for new, old in zip(cast_all, tree)):
            return tree
        return type(tree)(*cast_all) if hasattr(tree, "_fields") else type(tree)(cast_all)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        changed = {name: cast for name, value in fields.items() if (cast := cast_tensors(value, dtype)) is not value}
        if not changed:
            return tree
        other = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(other, name, value)
        return other
    return tree
