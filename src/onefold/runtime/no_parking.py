"""Parking of a model whose placement is fixed: nothing is ever parked. parking.py has the other one."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """The most bytes that a step takes on the device, as far as steps have shown, or as it may take at most."""

    took: int  # with the state that is on the device
    least: int  # without any


class NoParking:
    """Where the tiers of optimizer state were all decided by shard()."""

    active = False  # something has been parked since the last step()
    known: Known | None = None  # of the steps until the last one
    expected: Known | None = None  # of this step too, by the inputs of its forwards; None: nothing is known of them
    growth = 1.0  # of the activations of this step's forwards, at most

    @property
    def parked_bytes(self) -> int:
        """Bytes in host memory that are to come back to the device."""
        return 0

    def begin(self, excess_bytes: float, host_bytes: int, *, in_backward: bool) -> None:
        raise AssertionError("the placement is fixed")

    def keep_blocks_again(self) -> int:
        """As many blocks keep their activations again as before; how many."""
        return 0

    def grow_blocks(self) -> bool:
        """Activations of a block may take more since this step, as its inputs have grown; False if nobody knows."""
        return True

    def return_parameters(self) -> int:
        """Brings parameters back; how many bytes."""
        return 0

    def bring_back(self) -> None:
        """Brings back all that is parked, before step() or at its end."""

    def learn(self, known: Known | None) -> None:
        """Steps are known to take so much, until inputs grow again."""

    def expect_no_more(self) -> None:
        """What this step's forwards would have taken is not known: one of them failed, or was not watched."""
