"""Streams and events that order work on a device without making the host wait; on a CPU they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from onefold.comm.spans import span

STREAMS: dict[str, Any] = {"cuda": torch.cuda}  # type of device -> torch's module that has streams and events for it
FIRST = -1  # the priority of streams that carry messages: what compute waits for runs before compute


class StreamEvent(NamedTuple):
    """An event of a device's stream; empty on a CPU, where there is nothing to wait for."""

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
            self.event.wait()


def new_event(device: torch.device) -> StreamEvent:
    """An event of a device that has not been recorded: to wait for it is to wait for nothing."""
    streams = STREAMS.get(device.type)
    return StreamEvent() if streams is None else StreamEvent(streams.Event())


def event_now(device: torch.device) -> StreamEvent:
    """An event that passes once all that the current stream of a device holds now has run."""
    event = new_event(device)
    if event.event is not None:
        event.event.record(STREAMS[device.type].current_stream(device))
    return event


class SideStream:
    """A stream beside compute, made when it is first used. Where a device has none, everything runs in place."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._streams = STREAMS.get(device.type)
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, what is enqueued runs on this stream, after all that the current stream holds now."""
        if self._streams is None:
            yield
            return
        self.wait_for_current()
        with self._streams.stream(self._made()):
            yield

    @contextmanager
    def after(self, event: StreamEvent) -> Iterator[None]:
        """Inside, what is enqueued runs on this stream, after an event and not after anything else."""
        if self._streams is None:
            yield
            return
        with self._streams.stream(self._made()):
            event.stream_wait()
            yield

    def wait_for_current(self) -> None:
        """Makes this stream wait for all that the current stream holds now."""
        if self._streams is not None:
            current = self._streams.current_stream(self._device)
            if current != self._made():
                self._made().wait_stream(current)

    def event(self) -> StreamEvent:
        """An event that passes once all that this stream holds now has run."""
        event = new_event(self._device)
        if event.event is not None:
            event.event.record(self._made())
        return event

    def _made(self) -> torch.cuda.Stream:
        if self._stream is None:
            assert self._streams is not None
            self._stream = self._streams.Stream(self._device, priority=self._priority)
        return self._stream
