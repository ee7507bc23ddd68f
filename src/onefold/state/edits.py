"""Which parameters of a unit a user has written: the ledger that tells users' writes from Onefold's own.

torch counts the writes to every parameter (`_version`). The ledger stores the counts up to which every write is known.
Onefold's own writes go through `record_own_write`, which raises both counts by the same amount; so a count beyond the
stored one is a user's write, also if it came before or between Onefold's. The unit decides what follows: a user's write
reaches the fp32 master (replicated 16-bit parameters), needs nothing (replicated fp32 parameters), or is lost and
raises (sharded parameters). Writes through `.data` are not counted by torch: the update finds them, as parameters that
are not the rounded master (master.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onefold.model.dtensor_shards import write_counts
from onefold.state.guarded_parameters import no_guard


class Edits:
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._known = self._counts()

    def _counts(self) -> list[int]:
        with no_guard():
            return write_counts(self._params)

    def written(self) -> list[int]:
        """Indices of the parameters that a user has written since the last known write."""
        now = self._counts()
        return [] if now == self._known else [i for i, new in enumerate(now) if new != self._known[i]]

    def accept(self) -> None:
        """Counts every write until now as known: taken over, or dropped."""
        self._known = self._counts()

    def record_own_write(self, which: Sequence[int] | None = None) -> None:
        """Records that Onefold has written all parameters, or those flagged in `which`. It increments their versions,
        so that an autograd graph that saved the old values raises; users' writes stay unknown, to be found later."""
        params = self._params if which is None else [p for p, one in zip(self._params, which, strict=True) if one]
        before = self._counts()
        torch.autograd.graph.increment_version(params)
        grown = zip(self._known, self._counts(), before, strict=True)
        self._known = [known + now - was for known, now, was in grown]
