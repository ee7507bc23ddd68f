"""Says that copies take longer than the steps between them, and how many steps would be enough."""

from __future__ import annotations

import math

SHARE, LEAST_S = 0.02, 1.0  # of the time since the copy began, and in seconds: less is not worth a word


def late(copied: int, step: int, took_s: float, waited_s: float) -> str:
    """What to say if the copy of a step was complete `took_s` after it began, the last `waited_s` of which training
    has waited for it, at a later step; empty if it did not wait long.

    >>> late(20, 30, 4.0, 3.0)
    'waited 3.0 s for the copy of step 20, which took 4.0 s; copy every 40 steps (every=, --copy-every) or more'
    """
    steps_s = took_s - waited_s
    if step <= copied or steps_s <= 0 or waited_s < max(LEAST_S, SHARE * took_s):
        return ""
    enough = math.ceil(took_s / steps_s * (step - copied))
    return (
        f"waited {waited_s:.1f} s for the copy of step {copied}, which took {took_s:.1f} s; "
        f"copy every {enough} steps (every=, --copy-every) or more"
    )
