"""Bytes per element of the states of a unit. Integers only."""

from __future__ import annotations

from typing import NamedTuple

from onefold.errors import ConfigError
from onefold.settings.values import MASTER_BYTES


class Widths(NamedTuple):
    """Bytes per element of one unit's parameters, gradients in a reduction, kept gradients, master, and sums of
    gradients over micro-batches."""

    compute: int
    wire: int
    grad: int
    master: int  # beside the parameters: 4 an fp32 copy, 2 a remainder, 0 where parameters are their own master
    sums: int = 4
    flat: bool = False  # gradients accumulate, so that one rank too has them in one buffer, with padding

    @property
    def narrow(self) -> bool:
        return self.master > 0

    @property
    def unflattened(self) -> bool:
        """Whether one rank's gradients stay in autograd's own tensors, without padding."""
        return self.narrow and self.grad == self.compute and not self.flat


def widths_of(compute: str, master: str | None) -> Widths:
    """The widths of a unit where Onefold sums over ranks: of `Precision(compute=compute, master=master)`, decided.

    >>> widths_of("bf16", "split")
    Widths(compute=2, wire=2, grad=2, master=2, sums=4, flat=False)
    """
    check_master(compute, master)
    return Widths(4, 4, 4, 0) if compute == "fp32" else Widths(2, 2, 2, MASTER_BYTES[master])


def check_master(compute: str, master: str | None) -> None:
    """Raises for a split master of anything but bf16."""
    if master == "split" and compute != "bf16":
        raise ConfigError("master='split' needs compute='bf16': only bf16 is the upper half of fp32")
