"""Two streams beside compute on which tensors are updated: products of one matrix leave processors idle, and those of
another fill them.

A product of 1600 x 1600 has 91 tiles for the 132 multiprocessors of an H200. Every kernel stays the one it was, so bits
do not depend on the lanes. Work on a lane begins after what the current stream holds, and whoever reads or frees what
that work uses first makes the current stream wait for its end. On a CPU everything runs in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from onefold.comm.streams import SideStream, StreamEvent, event_now

LANES = 2


class Lanes:
    """The streams, which take turns."""

    def __init__(self, device: torch.device, number: int) -> None:
        """`number` is how many updates run at once; with one, all run in place."""
        self._device, self.number, self._turn = device, number, 0
        self._streams = [SideStream(device) for _ in range(number)]

    def run(self, work: Callable[[], None], *, beside: bool) -> StreamEvent:
        """Enqueues work on the next lane, or in place; the event passes once a lane has run it."""
        if not beside:
            work()
            return StreamEvent()
        self._turn = (self._turn + 1) % self.number
        with self._streams[self._turn].after_current():
            work()
            return event_now(self._device)

    def join(self) -> None:
        """Makes the current stream wait for all lanes."""
        for stream in self._streams:
            stream.join()
