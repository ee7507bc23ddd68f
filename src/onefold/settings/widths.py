"""Bytes per element of the states of a unit. Integers only."""

from __future__ import annotations

from typing import NamedTuple


class Widths(NamedTuple):
    """Bytes per element of one unit's parameters, gradients on the way, gradients kept, and master."""

    compute: int
    wire: int
    grad: int
    master: int  # beside the values: 4 an fp32 copy, 2 a remainder, 0 where the values are their own master

    @property
    def narrow(self) -> bool:
        return self.master > 0

    @property
    def updated(self) -> int:
        """Of the vectors the optimizer works on."""
        return 4 if self.narrow else self.compute
