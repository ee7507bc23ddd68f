"""How long this rank has waited for messages: the rest of a step is its own, and a slow rank is known by it.

The host's waits are added up by the clock. Waits of a CUDA stream are between two events, which are recorded only while
`on_stream` is set and read later, when they have passed: the host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Waits:
    def __init__(self) -> None:
        self.host_s = 0.0
        self.on_stream = False
        self._stream: torch.Stream | None = None  # the one that was current when `begin` was called
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def begin(self) -> None:
        """From now on waits of the current CUDA stream are recorded, until `read`."""
        self.on_stream, self._events = True, []
        self._stream = torch.accelerator.current_stream()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Around a wait of the current stream for a message."""
        if torch.accelerator.current_stream() != self._stream:  # waits of other streams are beside compute
            yield
            return
        before, after = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def read_stream_s(self) -> float:
        """Seconds that were recorded since `begin`; the stream has passed all of them."""
        found_s = sum(before.elapsed_time(after) for before, after in self._events) / 1e3
        self.on_stream, self._events = False, []
        return found_s
