"""Streams and events that order work on a device without making the host wait; on a CPU they do nothing.

They are torch.Stream and torch.Event, whose calls run in C++: those of torch.cuda look up the device in Python each
time, which at several calls a message costs the host more than the message itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from onefold.comm.spans import span

FIRST = -1  # the priority of streams that carry messages: what compute waits for runs before compute


class TorchStreams:
    """torch's streams and events of the accelerator."""

    @staticmethod
    def Stream(device: torch.device, priority: int) -> torch.Stream:
        return torch.Stream(device, priority=priority)

    @staticmethod
    def Event(device: torch.device) -> torch.Event:
        return torch.Event(device)

    @staticmethod
    def current_stream(index: int) -> torch.Stream:
        return torch.accelerator.current_stream(index)

    @staticmethod
    def set_stream(stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @staticmethod
    def index(device: torch.device) -> int:
        return torch.accelerator.current_device_index() if device.index is None else device.index


STREAMS: dict[str, Any] = {"cuda": TorchStreams}  # by type of device


class StreamEvent(NamedTuple):
    """An event of a device's stream; empty on a CPU, where there is nothing to wait for."""

    event: torch.Event | None = None

    def wait(self) -> None:
        """Blocks the host until the event has passed."""
        if self.event is not None:
            with span("wait", "copy", "the device"):
                self.event.synchronize()

    def query(self) -> bool:
        """Whether the event has passed."""
        return self.event is None or self.event.query()

    def record(self) -> None:
        """Moves the event to the end of what the current stream holds now."""
        if self.event is not None:
            self.event.record()

    def stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host does not wait."""
        if self.event is not None:
            self.event.wait()


def new_event(device: torch.device) -> StreamEvent:
    """An event of a device that has not been recorded: to wait for it is to wait for nothing."""
    streams = STREAMS.get(device.type)
    return StreamEvent() if streams is None else StreamEvent(streams.Event(device))


def event_now(device: torch.device) -> StreamEvent:
    """An event that passes once all that the current stream of a device holds now has run."""
    event = new_event(device)
    if event.event is not None:
        streams = STREAMS[device.type]
        event.event.record(streams.current_stream(streams.index(device)))
    return event


class CurrentStream:
    """Inside, a stream is the current one. torch's own context of a stream cannot be entered twice."""

    def __init__(self, streams: Any, stream: torch.Stream, before: torch.Stream) -> None:
        self._streams, self._stream, self._before = streams, stream, before

    def __enter__(self) -> None:
        self._streams.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        self._streams.set_stream(self._before)


class SideStream:
    """A stream beside compute, made when it is first used. Where a device has none, everything runs in place."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._streams = STREAMS.get(device.type)
        self._made: tuple[torch.Stream, torch.Event, int] | None = None

    def after_current(self) -> AbstractContextManager[None]:
        """Inside, what is enqueued runs on this stream, after all that the current stream holds now."""
        if self._streams is None:
            return nullcontext()
        stream, reached, index = self._make()
        current = self._streams.current_stream(index)
        if current != stream:
            reached.record(current)
            stream.wait_event(reached)
        return CurrentStream(self._streams, stream, current)

    def after(self, event: StreamEvent) -> AbstractContextManager[None]:
        """Inside, what is enqueued runs on this stream, after an event and not after anything else."""
        if self._streams is None:
            return nullcontext()
        stream, _, index = self._make()
        if event.event is not None:
            stream.wait_event(event.event)
        return CurrentStream(self._streams, stream, self._streams.current_stream(index))

    def wait_for_current(self) -> None:
        """Makes this stream wait for all that the current stream holds now."""
        self.after_current()

    def event(self) -> StreamEvent:
        """An event that passes once all that this stream holds now has run."""
        event = new_event(self._device)
        if event.event is not None:
            event.event.record(self._make()[0])
        return event

    def join(self) -> None:
        """Makes the current stream wait for all that this stream holds now."""
        if self._made is not None:
            self.event().stream_wait()

    def _make(self) -> tuple[torch.Stream, torch.Event, int]:
        """The stream, an event that is recorded again and again in streams that it waits for, the device's index."""
        if self._made is None:
            assert self._streams is not None
            index = self._streams.index(self._device)
            device = torch.device(self._device.type, index)
            self._made = self._streams.Stream(device, priority=self._priority), self._streams.Event(device), index
        return self._made
