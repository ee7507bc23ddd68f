"""How much may be in flight at once: bounds that the runtime keeps, and formulas count with."""

from __future__ import annotations

from collections.abc import Sequence

WORKERS = 3  # threads that update units on the host
AT_HAND = 1  # unit that is read or changed between steps, beside those of the workers
IN_FLIGHT = 2  # rounds on the way at once: one travels while the next fills, and buffers stay constant
WAITING = 3  # complete units that may wait for one before them; then it counts as skipped
READ_AHEAD = 2  # units whose shards are read from disk before they are fetched
WAITING_SHARE = 0.25  # of the gradients: so many bytes may wait on the device inside backward
LEAST_WAITING = 2  # of the largest
LEAVING = 2  # gradients on their way down before compute may have to wait


def under_way_bytes(sizes: Sequence[int]) -> int:
    """Of units that take so many bytes: as many as may be on their way to an update, or back, at once."""
    return sum(sorted(sizes)[-WORKERS:])


def waiting_bytes(transfers: Sequence[int]) -> int:
    """How many bytes of gradients may wait on the device inside backward, of transfers of these sizes.

    >>> waiting_bytes([10] * 100), waiting_bytes([10] * 4), waiting_bytes([10])
    (250, 20, 10)
    """
    return max(int(WAITING_SHARE * sum(transfers)), sum(sorted(transfers)[-LEAST_WAITING:]))
