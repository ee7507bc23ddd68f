"""Which parameters of a unit a user has written: the ledger that tells users' writes from Onefold's own.

torch counts the writes to every parameter (`_version`). The ledger stores the counts up to which every write is known.
Onefold's own writes go through `record_own_write`, which raises both counts by the same amount; so a count beyond the
stored one is a user's write, also if it came before or between Onefold's. The unit decides what follows: a user's write
reaches the fp32 master (replicated 16-bit parameters), needs nothing (replicated fp32 parameters), or is lost and
raises (sharded parameters). Writes through `.data` are not counted by torch: the update finds them, as parameters that
are not the rounded master (master.py), and while it is told to `watch`, the ledger finds them by digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from onefold.model.dtensor_shards import write_counts
from onefold.state.guarded_parameters import no_guard


class Edits:
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._known = self._counts()
        self._digests: Callable[[], Tensor] | None = None
        self._known_digests: Tensor | None = None  # while watched

    def _counts(self) -> list[int]:
        with no_guard():
            return write_counts(self._params)

    def written(self) -> list[int]:
        """Indices of the parameters that a user has written since the last known write."""
        now = self._counts()
        found = set() if now == self._known else {i for i, new in enumerate(now) if new != self._known[i]}
        if self._digests is not None and self._known_digests is not None:
            found.update(torch.nonzero(self._digests() != self._known_digests).flatten().tolist())
        return sorted(found)

    def accept(self) -> None:
        """Counts every write until now as known: taken over, or dropped."""
        self._known = self._counts()
        if self._digests is not None:
            self._known_digests = self._digests()

    def watch(self, digests: Callable[[], Tensor]) -> None:
        """Counts every write until now as known, and finds those through .data too until `unwatch`; `digests` returns
        one of each parameter."""
        self._digests = digests
        self.accept()

    def unwatch(self) -> None:
        """Ends `watch`."""
        self._digests = self._known_digests = None

    def record_own_write(self, which: Sequence[int] | None = None) -> None:
        """Records that Onefold has written all parameters, or those flagged in `which`. It increments their versions,
        so that an autograd graph that saved the old values raises; users' writes stay unknown, to be found later."""
        params = self._params if which is None else [p for p, one in zip(self._params, which, strict=True) if one]
        before = self._counts()
        torch.autograd.graph.increment_version(params)
        grown = zip(self._known, self._counts(), before, strict=True)
        self._known = [known + now - was for known, now, was in grown]
