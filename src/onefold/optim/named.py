"""Optimizers by name or class, for plans and commands: what their state costs, how one is made for a model, and the
matrices that it updates whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.cost.owners import newton_schulz_flops
from onefold.cost.states import StateCost, named_cost
from onefold.optim.elementwise import OPTIMIZERS, cost_of
from onefold.optim.muon import Muon
from onefold.optim.muon_placement import MUON, decide
from onefold.optim.newton_schulz import places_of
from onefold.optim.optimizer import Optimizer


class Chosen(NamedTuple):
    """An optimizer that was asked for by name or class."""

    cost: StateCost
    make: Callable[[nn.Module], Optimizer]
    """Makes one for a sharded model."""
    is_muon: bool = False

    @property
    def make_whole(self) -> Callable[[nn.Module], Optimizer] | None:
        """For a rehearsal, which needs an Optimizer only if it updates whole tensors."""
        return self.make if self.cost.whole else None

    def matrices(self, model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
        """The parameters that are updated whole, by name, with the flops of Newton-Schulz where that updates them."""
        if not self.cost.whole:
            return {}
        if not self.is_muon:
            return dict.fromkeys((name for name, _ in model.named_parameters()), 0)
        found = decide(model, blocks, {}, {})
        taken = {name: param for name, param in model.named_parameters() if found[id(param)].by == MUON}
        return {name: _flops(tuple(param.shape), found[id(param)].matrices) for name, param in taken.items()}


def _flops(size: tuple[int, ...], matrices: Any) -> int:
    places = places_of(size, matrices)
    return sum(math.prod(place.shape[:-2]) * newton_schulz_flops(*place.shape[-2:]) for place in places)


def choose(
    optimizer: str | type[torch.optim.Optimizer], settings: dict[str, Any] | None = None, state: str = "fp32"
) -> Chosen:
    """Of a name, such as "adamw" or "muon", or of a class. torch.optim.Muon is planned as onefold.Muon, with an AdamW
    for what it does not take."""
    given = settings or {}
    if optimizer in (Muon, torch.optim.Muon) or (isinstance(optimizer, str) and optimizer.lower() == "muon"):
        return Chosen(named_cost("muon", state), partial(Muon, **given), is_muon=True)
    cost = cost_of(optimizer, settings, state)
    given = given if state == "fp32" else {**given, "state": state}
    if isinstance(optimizer, str):
        cls, defaults = OPTIMIZERS[optimizer.lower()]
        return Chosen(cost, partial(Optimizer, cls=cls, **{**defaults, **given}))
    return Chosen(cost, partial(Optimizer, cls=optimizer, **given))
