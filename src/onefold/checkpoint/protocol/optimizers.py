"""Which Optimizers a checkpoint is saved from, or loaded into: all that the model has, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.errors import ConfigError
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine

Given = Optimizer | Sequence[Optimizer] | None  # the argument `optimizer` of save() and load()


def checked(engine: Engine, given: Given) -> list[Optimizer]:
    """The Optimizers in `given`; raises unless they are all of the model's, or none."""
    found: list[Any] = [] if given is None else [given] if isinstance(given, Optimizer) else _listed(given)
    for one in found:
        if not any(one is other for other in engine.optimizers):
            raise ConfigError(
                f"{type(one).__name__} is not the onefold.Optimizer of this model; give that one, or None for weights"
            )
    if found and len(found) != len(engine.optimizers):
        raise ConfigError(
            f"the model has {len(engine.optimizers)} Optimizers, and {len(found)} were given; give all of them, each "
            f"once: (first, second)"
        )
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
