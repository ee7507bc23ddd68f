"""Who wrote the parameters of a unit last: the ledger that tells users' writes from our own.

torch counts the writes to every parameter (its version). The ledger knows the counts up to which every write is
accounted for. Our own writes go through `ours`, which moves both counts together; so whatever is beyond the known
count is a user's write, also if it came before or between ours. What that means is the unit's to say: it reaches the
fp32 master (replicated 16-bit parameters), it is the truth already (replicated fp32 parameters), or it is lost and
raises (sharded parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from onefold.model.dtensor_shards import versions


class Author(Enum):
    """Who wrote last, as far as the ledger was told."""

    NOBODY = "the values are those that shard() was given"
    TRAINING = "an optimizer step"
    USER = "the user, in place or inside full_parameters"
    LOAD = "a checkpoint or a state dict"


class Edits:
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._known = versions(self._params)
        self.last = Author.NOBODY

    def written(self) -> list[int]:
        """Which parameters were written by a user since the last write that is accounted for."""
        now = versions(self._params)
        return [] if now == self._known else [i for i, new in enumerate(now) if new != self._known[i]]

    def accept(self, author: Author | None = None) -> None:
        """Every write until now is accounted for: taken over, or dropped (`None`)."""
        self._known = versions(self._params)
        self.last = author or self.last

    def ours(self, author: Author, which: Sequence[int] | None = None) -> None:
        """We have written all parameters, or some (a flag each). Autograd hears of it, so that a graph that still needs
        the old values raises; what users wrote is still to be accounted for."""
        params = self._params if which is None else [p for p, one in zip(self._params, which, strict=True) if one]
        before = versions(self._params)
        torch.autograd.graph.increment_version(params)
        grown = zip(self._known, versions(self._params), before, strict=True)
        self._known = [known + now - was for known, now, was in grown]
        self.last = author
