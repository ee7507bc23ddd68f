"""The trainer's GPT, initialised like GPT-2, and next-token targets.

With torch's default initialisation this GPT predicts its own input, so with the input as target loss and gradients
would be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT, initialise


def initialised_gpt(shape: Shape, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(shape).apply(partial(initialise, layers=shape.layers))


def next_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and the one after each, the first after the last."""
    return tokens, tokens.roll(-1, 1)


def relative_distance(mine: Mapping[str, Tensor], other: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """The distance of the parameters of two runs, as a share of how far the first has moved."""

    def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
        return sum(float((one[name].cpu().double() - two[name].cpu().double()).square().sum()) for name in one) ** 0.5

    return distance(mine, other) / distance(mine, before)
