"""How long tests wait: for commands and scripts that they start, and beyond a promised time on a busy machine.

A launch of two ranks takes 10 s on two idle cores, and twenty times that on a machine that is busy with other work.
"""

import os

PATIENCE_S = 600.0  # a guard against hangs, and no promise of speed


def queued(seconds: float) -> float:
    """The seconds that work takes where each process has a core; where processes queue for cores, as much more as the
    queue is longer."""
    return seconds * max(1.0, 1.5 * os.getloadavg()[0] / (os.cpu_count() or 1))
