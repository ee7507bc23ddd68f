"""Bytes per element of the states of a unit. Integers only."""

from __future__ import annotations

from typing import NamedTuple


class Widths(NamedTuple):
    """Bytes per element of one unit's parameters, gradients in a reduction, kept gradients, and master."""

    compute: int
    wire: int
    grad: int
    master: int  # beside the parameters: 4 an fp32 copy, 2 a remainder, 0 where parameters are their own master

    @property
    def narrow(self) -> bool:
        return self.master > 0

    @property
    def updated(self) -> int:
        """Bytes per element of what the optimizer updates."""
        return 4 if self.narrow else self.compute
