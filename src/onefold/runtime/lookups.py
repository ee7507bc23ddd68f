"""Look-ups of parameters by name: `module._parameters` is a dictionary of ours, which unshards at a look-up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from onefold.runtime.attachments import Attachments
from onefold.runtime.unsharding import Unsharding


class GatheringDict(dict[str, "nn.Parameter | None"]):
    """A module's `_parameters`; a look-up of a parameter unshards its unit while the model runs."""

    def __init__(self, params: dict[str, nn.Parameter | None], unsharding: Unsharding, units: dict[str, int]) -> None:
        super().__init__(params)
        self._unsharding, self._unit_of = unsharding, units

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if torch.compiler.is_compiling():  # no guards on units: equal blocks share a graph, and the guard sees any use
            return dict.__getitem__(self, name)
        index = self._unit_of.get(name)
        if index is not None:
            self._unsharding.look_up(index)
        return dict.__getitem__(self, name)


def intercept_lookups(
    modules: Iterator[nn.Module], unit_of: dict[int, int], unsharding: Unsharding, attachments: Attachments
) -> None:
    """Replaces `_parameters` of every module that owns sharded parameters by a GatheringDict."""
    for module in modules:
        units = {name: unit_of[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in unit_of}
        if units:
            module.__dict__["_parameters"] = GatheringDict(module._parameters, unsharding, units)
            attachments.change(partial(_restore_lookups, module))


def _restore_lookups(module: nn.Module) -> None:
    module.__dict__["_parameters"] = dict(module._parameters)
