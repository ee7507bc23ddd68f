"""The model of a run: the built-in GPT with random or with GPT-2's values, or a class of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from onefold.comm.mesh import Mesh
from onefold.cost.shapes import Shape
from onefold.settings.zero import Source
from onefold.train.run.gpt2 import Gpt2Values
from onefold.train.run.model import GPT, initialise
from onefold.train.run.pretrained import Pretrained


@dataclass(frozen=True)
class RunModel:
    """A model on the meta device, and what a run has to know of it."""

    module: nn.Module
    shape: Shape
    init: Source
    """What gives the parameters their values."""

    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """The mean cross-entropy of inputs and targets."""

    twin: Callable[[], nn.Module]
    """Makes another one on the meta device, to rehearse a step."""

    sample: Callable[[Tensor], Any]
    """The arguments of the twin that make its first result a loss, from tokens."""

    def stretch(self, whole: Tensor) -> Tensor:
        """This rank's tokens of whole sequences: all of them, unless the mesh cuts the built-in GPT's sequences."""
        return self.module.stretch(whole) if isinstance(self.module, GPT) else whole


Maker: TypeAlias = Callable[[Pretrained, Shape], RunModel]
"""Makes a model of transformers; it stands in a room above this one."""


def build(shape: Shape, mesh: Mesh | None = None) -> GPT:
    """On the meta device. `mesh` is one that cuts sequences."""
    with torch.device("meta"):
        return GPT(shape, mesh)


def built_in(shape: Shape, mesh: Mesh | None, start: Pretrained | None) -> RunModel:
    """The built-in GPT, with the values of `start` if there is one."""
    init: Source = partial(initialise, layers=shape.layers) if start is None else Gpt2Values(start.folder, shape)
    twice: Callable[[Tensor], Any] = lambda tokens: (tokens, tokens)  # noqa: E731
    return RunModel(build(shape, mesh), shape, init, _called, partial(build, shape), twice)


def _called(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)
    return loss
