"""A model that no longer trains: while all parameters are frozen and there is no Optimizer, masters and gradients are
freed.

An Optimizer keeps them: a discriminator is frozen for a while and trained again, and its state must stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onefold.runtime.attached import AttachedOptimizers
from onefold.state.unit import Unit


class Freezing:
    def __init__(self, units: Sequence[Unit], params: Sequence[nn.Parameter], optimizers: AttachedOptimizers) -> None:
        self._units, self._params, self._optimizers = units, params, optimizers
        self._freed = False

    def follow(self) -> None:
        """Frees masters and gradients if the model has been frozen, and makes masters anew if it trains again."""
        frozen = not len(self._optimizers) and not any(param.requires_grad for param in self._params)
        if frozen and not self._freed:
            for unit in self._units:
                unit.free_training_state()
            self._freed = True
        elif not frozen:
            self.train_again()

    def train_again(self) -> None:
        """Makes masters anew, from the parameters as they are."""
        if self._freed:
            for unit in self._units:
                unit.make_training_state()
            self._freed = False
