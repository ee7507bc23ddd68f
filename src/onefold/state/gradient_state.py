"""What reductions have left of one unit's gradient, and in which memory: a state, and one table of transitions.

Two things stand beside this state and have no part in it, because both coexist with the sum of earlier reductions: the
local sum, which a later reduction will take (local_sum.py), and reductions in flight (reduction.py). Each is an object
that owns its buffers, and is there or is not.
"""

from __future__ import annotations

from enum import Enum, auto


class GradientState(Enum):
    """Where the sum over ranks of one unit's gradient is."""

    EMPTY = "no reduction has ended: the unit's own buffer, if there is one, holds nothing that counts"
    REDUCED = "the sum is on the device: my shard of it, or all of it where gradients are replicated"
    OFFLOADED = "my shard of the sum is on the host, or on its way there; nothing is held on the device"


class GradientEvent(Enum):
    REDUCTION_ENDED = auto()  # its result is the sum, or is added to the sum of earlier reductions
    SENT_TO_HOST = auto()  # the sum is complete, and step() will update on the host
    LENT = auto()  # the sum is complete, and the host update that backward has started reads and frees it
    USED = auto()  # backward has updated the unit on the device
    RETURNED = auto()  # the device updates the unit from this step on, and the sum has been copied back to it
    ZEROED = auto()  # zero_grad(set_to_none=False) keeps a gradient of zeros
    DROPPED = auto()  # zero_grad(), or a load


GRADIENT_STATES: dict[tuple[GradientState, GradientEvent], GradientState] = {
    (GradientState.EMPTY, GradientEvent.REDUCTION_ENDED): GradientState.REDUCED,
    (GradientState.EMPTY, GradientEvent.ZEROED): GradientState.REDUCED,
    (GradientState.EMPTY, GradientEvent.DROPPED): GradientState.EMPTY,
    (GradientState.REDUCED, GradientEvent.REDUCTION_ENDED): GradientState.REDUCED,
    (GradientState.REDUCED, GradientEvent.SENT_TO_HOST): GradientState.OFFLOADED,
    (GradientState.REDUCED, GradientEvent.LENT): GradientState.EMPTY,
    (GradientState.REDUCED, GradientEvent.USED): GradientState.EMPTY,
    (GradientState.REDUCED, GradientEvent.DROPPED): GradientState.EMPTY,
    (GradientState.OFFLOADED, GradientEvent.REDUCTION_ENDED): GradientState.REDUCED,  # it was brought back first
    (GradientState.OFFLOADED, GradientEvent.RETURNED): GradientState.REDUCED,
    (GradientState.OFFLOADED, GradientEvent.DROPPED): GradientState.EMPTY,
}
