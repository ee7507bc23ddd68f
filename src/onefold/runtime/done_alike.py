"""What users must do alike on all ranks between two steps: change settings of param groups, call load_state_dict().

Ranks that did not would train shards at different rates, or shards of two models. A digest of both travels with the
flags that ranks exchange in every step, as itself and as its complement: where the largest bytes of all ranks are no
complements of each other, ranks differ. Only then do they exchange what they have, and every rank raises.

Whether gradients have accumulated may differ between ranks, and all need to know: it is in the digest too. A rank that
sees parameters unfrozen tells its peers in the same way, before its units change. One whose forwards take more memory
than any before says so in a byte beside the digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import Tensor

from onefold.comm.agreement import first_difference
from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.traffic import DIGEST_BYTES, SAID_BYTES
from onefold.errors import MismatchError

HALF = DIGEST_BYTES // 2
PLAIN = (float, bool, int, str, type(None))
ACCUMULATED = "accumulate()"
UNFROZEN = "unfrozen since shard(): {}"
REMEDY = (
    "do the same on every rank: load_state_dict() and requires_grad_() without 'if rank == 0', and a schedule that "
    "follows a loss (ReduceLROnPlateau) with the mean of all ranks' losses"
)


class DoneAlike:
    """`groups` returns the param groups of all Optimizers of the model; `accumulated`, whether gradients have
    accumulated on this rank."""

    def __init__(
        self, everyone: Comm, groups: Callable[[], Sequence[Mapping[str, Any]]], accumulated: Callable[[], bool]
    ) -> None:
        self._everyone, self._groups, self._accumulated = everyone, groups, accumulated
        self._loads = Counter[str]()  # by module, since the model was sharded or a checkpoint replaced everything
        self._unfrozen: Sequence[str] = ()  # see `unfreezing`
        self._known: object = None  # what the digest is of
        self._digest = b""
        self.takes_more = False  # this rank, in this step
        self._some_take_more = False

    def loaded(self, module: str) -> None:
        """load_state_dict() has set the parameters of this module."""
        self._loads[module] += 1

    @contextmanager
    def unfreezing(self, names: Sequence[str]) -> Iterator[None]:
        """Inside, this rank says that it sees these parameters unfrozen."""
        self._unfrozen = names
        try:
            yield
        finally:
            self._unfrozen = ()

    @property
    def some_take_more(self) -> bool:
        """Whether some rank had said, when ranks compared last, that its forwards take more memory than any before."""
        return self._some_take_more if self._everyone.size > 1 else self.takes_more

    def forget_more(self) -> None:
        """The step is over in which some rank took more."""
        self.takes_more = self._some_take_more = False

    def forget_loads(self) -> None:
        """All ranks have replaced all parameters together."""
        self._loads.clear()
        self._known = None

    def said(self) -> bytes:
        """What this rank says of itself: `SAID_BYTES` bytes, or none if it is alone."""
        if self._everyone.size == 1:
            return b""
        settings = [list(_plain_settings(group)) for group in self._groups()]
        now = settings, sum(self._loads.values()), self._accumulated(), self._unfrozen
        if now != self._known:
            mine = hashlib.blake2b("\n".join(self._lines()).encode(), digest_size=HALF).digest()
            self._known, self._digest = now, mine + bytes(255 - byte for byte in mine)
        return self._digest + bytes([self.takes_more])

    def compare(self, heard: bytes) -> bool:
        """Raises on every rank unless all ranks `said` the same; `heard` has the largest byte at every place. True if
        gradients have accumulated on some rank."""
        self._some_take_more = heard[DIGEST_BYTES:SAID_BYTES] == b"\1"
        if any(high + low != 255 for high, low in zip(heard[:HALF], heard[HALF:DIGEST_BYTES], strict=True)):
            rows = self._everyone.exchange("\n".join(self._lines()).encode(), Label("agree", "what ranks did"))
            said = [[line for line in row.decode().split("\n") if line not in ("", ACCUMULATED)] for row in rows]
            if any(lines != said[0] for lines in said):
                ranks = [self._everyone.world_rank(row) for row in range(self._everyone.size)]
                raise MismatchError(first_difference(said, ranks, REMEDY))
            return True
        return self._accumulated()

    def _lines(self) -> list[str]:
        groups = [
            f"{key}={value} in param group {index}"
            for index, group in enumerate(self._groups())
            for key, value in _plain_settings(group)
        ]
        loads = [f"{count} x load_state_dict() of {name or 'the root'}" for name, count in sorted(self._loads.items())]
        unfrozen = [UNFROZEN.format(name) for name in self._unfrozen]
        return [*groups, *loads, *unfrozen, *[ACCUMULATED] * self._accumulated()]


def _plain_settings(group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The settings of a param group that are numbers, tuples of them, words or None, and are not on a device that would
    wait."""
    for key, value in group.items():
        kind = type(value)  # before isinstance, which is slow for Real: this runs in every step
        if kind in PLAIN or (kind is tuple and all(isinstance(number, Real) for number in value)):
            yield key, value
        elif isinstance(value, Tensor):
            if value.numel() == 1 and value.device.type == "cpu":
                yield key, value.item()
        elif kind is not list and isinstance(value, Real):
            yield key, value
