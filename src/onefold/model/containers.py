"""Tensors in whatever modules take and give: mappings, sequences, dataclasses, objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

DEEPEST = 3  # levels of unknown objects that are searched for tensors


def listed(output: Any) -> list[Tensor]:
    """All of them; most modules give one."""
    return [output] if isinstance(output, Tensor) else list(tensors_in(output))


def tensors_in(output: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Each container is searched once: some hold themselves, or what holds them."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        values: Iterable[Any] = output.values()
    elif isinstance(output, list | tuple):
        values = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, f.name) for f in dataclasses.fields(output)]
    elif depth < DEEPEST and hasattr(output, "__dict__") and not isinstance(output, type | nn.Module):
        values, depth = vars(output).values(), depth + 1  # an object of the user's own
    else:
        return
    seen = set() if seen is None else seen
    if id(output) not in seen:
        seen.add(id(output))
        for value in values:
            yield from tensors_in(value, depth, seen)


def cast_in(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in containers, cast; what holds none that changes stays the same object."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        changed = {key: cast for key, value in tree.items() if (cast := cast_in(value, dtype)) is not value}
        if not changed:
            return tree
        fresh = copy.copy(tree)
        fresh.update(changed)  # type: ignore[attr-defined]
        return fresh
    if isinstance(tree, list | tuple):
        cast_all = [cast_in(value, dtype) for value in tree]
        if all(new is old for new, old in zip(cast_all, tree)):
            return tree
        return type(tree)(*cast_all) if hasattr(tree, "_fields") else type(tree)(cast_all)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        changed = {name: cast for name, value in fields.items() if (cast := cast_in(value, dtype)) is not value}
        if not changed:
            return tree
        other = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(other, name, value)
        return other
    return tree
