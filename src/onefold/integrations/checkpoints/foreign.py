"""A checkpoint of another program, as what Onefold needs of it: tensors by name, optimizer state by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.errors import CheckpointError
from onefold.integrations.checkpoints.inert import CLASS
from onefold.integrations.checkpoints.pickled import StoredTensor


class Elements(Protocol):
    """The elements of a tensor, read when they are needed."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def chunks(self) -> Iterator[Tensor]:
        """All elements in row-major order, as vectors."""


class Vector:
    """Vectors one after the other, as the ranks of a run held the parts of one."""

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self._parts = parts
        self._starts = list(accumulate((part.numel for part in parts), initial=0))

    @property
    def numel(self) -> int:
        return self._starts[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].dtype

    def ranges(self, span: Span) -> list[Range]:
        """Where these elements are stored."""
        found = [
            Range(part, Span(start, start + part.numel).clip(span).shift(-start))
            for part, start in zip(self._parts, self._starts)
        ]
        return [one for one in found if one.span.numel]


class Range(NamedTuple):
    """Some elements of a stored tensor."""

    tensor: StoredTensor
    span: Span


class Joined:
    """A tensor whose elements are ranges of stored ones, one after the other."""

    def __init__(self, name: str, shape: Sequence[int], ranges: Sequence[Range], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self._ranges = tuple(shape), dtype, ranges
        found = sum(one.span.numel for one in ranges)
        if found != math.prod(shape):
            raise CheckpointError(
                f"{name} of shape {self.shape} has {found:,} of {math.prod(shape):,} elements stored; the files are of "
                f"different checkpoints, or one was cut short"
            )

    def chunks(self) -> Iterator[Tensor]:
        for one in self._ranges:
            yield from one.tensor.chunks(one.span)


def stored(name: str, tensor: StoredTensor) -> Joined:
    """A tensor that is stored as it is."""
    return Joined(name, tensor.shape, [Range(tensor, Span(0, tensor.numel))], tensor.dtype)


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter with its optimizer state, or a buffer."""

    name: str
    kind: str  # "trained", "frozen" or "buffer"
    value: Elements
    also: tuple[str, ...] = ()  # other names of the same tensor
    states: Mapping[str, Elements] = field(default_factory=dict)
    singles: Mapping[str, Any] = field(default_factory=dict)  # step counts


class ForeignGroup(NamedTuple):
    """A param group: names of its parameters, in order, and its settings."""

    names: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Foreign:
    """All that is taken from a checkpoint of another program."""

    origin: str  # by what it was written, for people
    tensors: Sequence[ForeignTensor]
    groups: Sequence[ForeignGroup] | None  # None without an optimizer
    step: int | None
    skipped: int = 0
    loss_scale: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's, which names the optimizer
    modules: Mapping[str, Any] = field(default_factory=dict)  # extra state by module
    extra: Mapping[str, Any] = field(default_factory=dict)  # everything else, which load() returns


def with_values(value: Any) -> Any:
    """The same nested value with each StoredTensor read into memory; objects that no process may build are dropped."""
    if isinstance(value, StoredTensor):
        return value.value()
    if isinstance(value, list | tuple):
        return type(value)(with_values(item) for item in value)
    if isinstance(value, dict):
        return None if is_object(value) else {key: with_values(item) for key, item in value.items()}
    return value


def is_object(value: Any) -> bool:
    return isinstance(value, dict) and CLASS in value
