"""How many blocks keep their activations, and are not computed again, where the first step decides: activations="auto"
beside Offload(optimizer="auto"). The first step computes all of them again, which shows the least that a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

UNKNOWN = 1 << 60  # bytes that fit on no device


class BlockChoice:
    """The blocks of a model that may keep their activations, in the order of forward. A block that does holds
    `more_bytes` more from its forward to its backward than one that is computed again, which holds only its input."""

    def __init__(self, names: Sequence[str], more_bytes: int, keep: Callable[[frozenset[str]], None]) -> None:
        self.names, self.more_bytes, self._keep = tuple(names), more_bytes, keep
        self.kept = 0

    def grow(self, times: float) -> None:
        """Activations may take so many times the memory from now on; infinity if nothing is known of it."""
        self.more_bytes = UNKNOWN if math.isinf(times) else int(self.more_bytes * times)

    def keep_last(self, count: int) -> None:
        """The last `count` blocks keep their activations from the next forward on, and no others. Backward comes to the
        last ones first, and frees what they keep before the first of the others is computed again."""
        self.kept = count
        self._keep(frozenset(self.names[len(self.names) - count :]))
