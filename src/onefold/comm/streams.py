"""CUDA streams and events that order work on the device without making the host wait; on a CPU they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from onefold.comm.spans import span

FIRST = -1  # the priority of streams that carry messages: what compute waits for runs before compute


class StreamEvent(NamedTuple):
    """An event of a CUDA stream; empty on a CPU, where there is nothing to wait for."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Blocks the host until the event has passed."""
        if self.event is not None:
            with span("wait", "copy", "the device"):
                self.event.synchronize()

    def query(self) -> bool:
        """Whether the event has passed."""
        return self.event is None or self.event.query()

    def stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


def event_now(device: torch.device) -> StreamEvent:
    """An event that passes once all that the current stream of a device holds now has run."""
    if device.type != "cuda":
        return StreamEvent()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return StreamEvent(event)


class SideStream:
    """A CUDA stream beside compute, made when it is first used. Without CUDA everything runs in place."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, what is enqueued runs on this stream, after all that the current stream holds now."""
        if not self._cuda:
            yield
            return
        self.wait_for_current()
        with torch.cuda.stream(self._made()):
            yield

    @contextmanager
    def after(self, event: StreamEvent) -> Iterator[None]:
        """Inside, what is enqueued runs on this stream, after an event and not after anything else."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._made()):
            event.stream_wait()
            yield

    def wait_for_current(self) -> None:
        """Makes this stream wait for all that the current stream holds now."""
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            if current != self._made():
                self._made().wait_stream(current)

    def event(self) -> StreamEvent:
        """An event that passes once all that this stream holds now has run."""
        if not self._cuda:
            return StreamEvent()
        event = torch.cuda.Event()
        event.record(self._made())
        return StreamEvent(event)

    def _made(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=self._priority)
        return self._stream
