"""The sizes of the inputs of training forwards: whether a new one may take more memory than all before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

Sizes = tuple[tuple[int, ...], ...]  # of each input tensor


class Growth(NamedTuple):
    """How much more memory a forward may take than any before."""

    times: float = 1.0  # that of activations; infinity if nothing is known
    sums: bool = False  # it is beside sums of gradients, and none beside sums had inputs as large

    def __bool__(self) -> bool:
        return self.times > 1 or self.sums


class Graph:
    """Is kept by the autograd graph of one forward, and so tells whether its activations are there."""

    used = False  # a backward has come to it, which frees activations


class Forward(NamedTuple):
    """What is known of a forward when it begins."""

    sizes: Sizes
    graphs: int  # whose activations are there in the end: its own, and those of forwards that no backward has used


class SeenInputs:
    def __init__(self) -> None:
        self._seen: list[Forward] = []  # of steps that took what is known; none is at most as large as another
        self._begun: list[Forward] = []  # of this step, where they were larger
        self._apart: list[Forward] = []  # of this step too, but a later one like them may take more than they did

    def growth(self, inputs: Iterable[Tensor], graphs: int = 1) -> float:
        """How many times the activations of any forward before may be there in this one? At most 1 if one was as large
        in every dimension, and beside as many graphs. Activations grow with the batch, and at most with the square of
        any other dimension, as attention has it in sequences; infinity if no inputs were like these. They are seen from
        now on, until `forget`.

        >>> import torch
        >>> seen = SeenInputs()
        >>> [seen.growth([torch.empty(size)]) for size in [(2, 8), (4, 8), (1, 4), (2, 24), (4, 24)]]
        [inf, 2.0, 1.0, 9.0, 2.0]
        """
        new = Forward(tuple(_size(tensor) for tensor in inputs), graphs)
        found = min((_times(new, old) for old in [*self._seen, *self._begun]), default=math.inf)
        if found > 1:
            self._begun.append(new)
        return found

    def learn(self) -> None:
        """What the forwards of this step took is known."""
        for new in [*self._apart, *self._begun]:
            self._seen = [old for old in self._seen if _times(old, new) > 1] + [new]
        self._apart, self._begun = [], []

    def set_apart(self) -> None:
        """What was parked for the forwards of this step is back before its end: for others like them it parks again."""
        self._apart += self._begun
        self._begun = []

    def forget(self) -> None:
        """What the forwards of this step would have taken is not known."""
        self._apart, self._begun = [], []


def _size(tensor: Tensor) -> tuple[int, ...]:
    """The shape; of a nested tensor, whose rows differ in length, the bytes that it holds."""
    return (tensor.values().numel(),) if tensor.is_nested else tuple(tensor.shape)


def _times(new: Forward, old: Forward) -> float:
    """The most that activations grow by from the `old` forward to the `new` one, at most 1 if they do not."""
    if [len(size) for size in new.sizes] != [len(size) for size in old.sizes]:
        return math.inf
    grown = max((_grown(*both) for both in zip(new.sizes, old.sizes, strict=True)), default=1.0)
    return grown * max(new.graphs / old.graphs, 1.0)


def _grown(new: Sequence[int], old: Sequence[int]) -> float:
    times = 1.0
    for dim, (now, before) in enumerate(zip(new, old, strict=True)):
        if now > before:
            times *= (now / max(before, 1)) ** (1 if dim == 0 else 2)
    return times
