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


class SeenInputs:
    def __init__(self) -> None:
        self._seen: list[Sizes] = []  # none of them is at most as large as another in every dimension

    def growth(self, inputs: Iterable[Tensor]) -> float:
        """How many times the activations of any forward before may this one have? At most 1 if one was as large in
        every dimension. Activations grow with the batch, and at most with the square of any other dimension, as
        attention has it in sequences; infinity if no inputs were like these. They are seen from now on.

        >>> import torch
        >>> seen = SeenInputs()
        >>> [seen.growth([torch.empty(size)]) for size in [(2, 8), (4, 8), (1, 4), (2, 24), (4, 24)]]
        [inf, 2.0, 1.0, 9.0, 2.0]
        """
        new = tuple(tuple(tensor.shape) for tensor in inputs)
        found = min((_times(new, old) for old in self._seen), default=math.inf)
        if found > 1:
            self._seen = [old for old in self._seen if _times(old, new) > 1] + [new]
        return found


def _times(new: Sizes, old: Sizes) -> float:
    """The most that activations grow by from the `old` sizes to the `new` ones, 1 if they do not."""
    if [len(size) for size in new] != [len(size) for size in old]:
        return math.inf
    return max((_grown(*both) for both in zip(new, old, strict=True)), default=1.0)


def _grown(new: Sequence[int], old: Sequence[int]) -> float:
    times = 1.0
    for dim, (now, before) in enumerate(zip(new, old, strict=True)):
        if now > before:
            times *= (now / max(before, 1)) ** (1 if dim == 0 else 2)
    return times
