"""Which parameters of a model were used in this step, by this rank and by any rank: one flag per parameter.

A parameter that no rank used is not updated, as in plain PyTorch; neither is one whose .grad a user has set to None.
Ranks that skipped a parameter must hear of ranks that used it, so the flags are agreed on once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label

UNUSED, USED, DROPPED, MORE = (
    0,
    1,
    2,
    3,
)  # what a rank says of a parameter, a byte each; of all ranks the highest counts
TO_UPDATE = bytes(word == USED for word in range(256))  # translates what ranks say of a parameter


class Heard(NamedTuple):
    """What all ranks said together."""

    used: bool  # some rank has used a parameter in this step
    others: bytes  # what else ranks said: the largest byte at every place
    more: bool  # some rank begins another backward of this step


class UsedParameters:
    """`counts`: how many parameters each unit has. Parameters are numbered unit by unit."""

    def __init__(self, counts: Sequence[int]) -> None:
        ends = list(accumulate(counts))
        self._units = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        self._total = sum(counts)
        self._used = bytearray(self._total)  # by this rank, since gradients were last dropped
        self._to_update = bytearray(self._total)  # to be updated: used by some rank, dropped by none; once agreed

    @property
    def any(self) -> bool:
        """True if this rank has used a parameter since gradients were last dropped."""
        return any(self._used)

    def mark(self, index: int) -> None:
        """This rank has a gradient of a parameter."""
        self._used[index] = USED

    def forget(self, index: int) -> None:
        """The gradient of one parameter is dropped."""
        self._used[index] = UNUSED

    def forget_all(self) -> None:
        """All gradients are dropped or used up."""
        self._used = bytearray(self._total)

    def of_unit(self, index: int) -> bytes:
        """Which parameters of a unit this rank has used, a flag each."""
        return bytes(self._used[self._units[index]])

    def agree(self, everyone: Comm, dropped: Iterable[int], others: bytes, *, more: bool) -> Heard:
        """Tell all ranks which parameters this rank used, and which it `dropped` since; hear which are to be updated.

        Bytes of `others` travel along. A rank that begins another backward of the step says MORE of every parameter:
        ranks may run different numbers of backwards, and agree again after each.
        """
        said = bytearray([MORE]) * self._total if more else bytearray(self._used)
        for index in () if more else dropped:
            said[index] = DROPPED
        words = everyone.all_reduce_max(bytes(said) + others, Label("used-flags", "step"))  # one label: they must meet
        used = words[: self._total]
        self._to_update = bytearray(used.translate(TO_UPDATE))
        return Heard(any(used), words[self._total :], MORE in used)

    def will_update(self, index: int, flags: bytes) -> None:
        """Marks the parameters of a unit that any rank used, a flag each, as to be updated."""
        self._to_update[self._units[index]] = flags

    def leave_out(self, indices: Iterable[int]) -> None:
        """These parameters are not to be updated, although some rank used them."""
        for index in indices:
            self._to_update[index] = UNUSED

    def to_update_of(self, index: int) -> bytearray:
        """Which parameters of a unit are to be updated, a flag each."""
        return self._to_update[self._units[index]]

    def to_update(self) -> list[int]:
        """All parameters that are to be updated."""
        return [index for index, flag in enumerate(self._to_update) if flag]
