"""Limits on what is in flight at once, which the runtime keeps and the planner's formulas use."""

from __future__ import annotations

from collections.abc import Sequence

WORKERS = 3  # threads that run host updates
BETWEEN_STEPS = 1  # unit whose state is loaded to be read or changed between steps, beside those of the workers
IN_FLIGHT = 2  # reductions at once: one is sent while the next one's gradients are added
WAITING = 3  # complete units that may wait for an earlier one in the reduce schedule; then that counts as skipped
READ_AHEAD = 2  # units whose shards are read from disk before they are needed
WAITING_SHARE = 0.25  # of the bytes of gradients: so many may wait on the device for host updates in backward
LEAST_WAITING = 2  # of the largest gradients may wait in any case
UNITS_AHEAD = 8  # units whose backward the host may launch before the device has run it, where threads run updates
COPYING = 2  # gradients being copied to the host before compute may have to wait


def updating_bytes(sizes: Sequence[int]) -> int:
    """The most bytes that units of these sizes take while host updates of them run at once."""
    return sum(sorted(sizes)[-WORKERS:])


def reading_bytes(sizes: Sequence[int], prefetch: int) -> int:
    """The most bytes that shards of these sizes, which are kept in files, take while they are in memory for
    all-gathers: of units in use, used before, prefetched, and read ahead.

    >>> reading_bytes([10] * 100, 1), reading_bytes([10, 20], 1)
    (50, 30)
    """
    return sum(sorted(sizes)[-(2 + READ_AHEAD + prefetch) :])


def waiting_bytes(transfers: Sequence[int]) -> int:
    """The bytes of gradients that may wait on the device for host updates in backward, given the sizes of all.

    >>> waiting_bytes([10] * 100), waiting_bytes([10] * 4), waiting_bytes([10])
    (250, 20, 10)
    """
    return max(int(WAITING_SHARE * sum(transfers)), sum(sorted(transfers)[-LEAST_WAITING:]))
