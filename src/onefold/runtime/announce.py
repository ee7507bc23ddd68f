"""Says what is about to run, in three sentences, for loops that are not Onefold's own: on a terminal, and in the log at
level INFO."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from torch import nn

from onefold.cost.machine import here
from onefold.cost.run_summary import run_sentences
from onefold.cost.states import named_cost, state_bytes
from onefold.runtime.automatic import choice_of
from onefold.runtime.engine import engine_of

LOG = logging.getLogger("onefold")


def say(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        LOG.info("%s", sentence)
        if sys.stderr.isatty() and not LOG.isEnabledFor(logging.INFO):
            sys.stderr.write(f"onefold: {sentence}\n")


def say_states(model: nn.Module) -> None:
    """Says the settings of a sharded model and what its states take, with the Optimizers that it has. On rank 0, where
    the shards are largest; what activations take nobody knows before the first batch."""
    engine = engine_of(model)
    resolved, cost = engine.resolved, engine.optimizers.state_cost or named_cost("adamw")
    if engine.comms.world.rank or not engine.units:
        return
    sizes = [unit.size(0, resolved.precision) for unit in resolved.units]
    states = state_bytes(sizes, [unit.placement for unit in resolved.units], cost)
    say(run_sentences(choice_of(resolved), None, states, None, here(resolved.device).memory_bytes))
