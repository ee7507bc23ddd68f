"""What ranks enqueue on the streams of a device, recorded on CPUs, and whether it can run to its end.

Over NCCL the host never waits: it enqueues kernels, messages, and waits for events. Whether ranks can wait for each
other forever is then a question of what was enqueued in which order, and needs no GPU. On each rank `recorded()` makes
the engine believe that the CPU has streams and that its wire is NCCL's; messages carry nothing, while what hosts tell
each other is real. `circle` runs what all ranks recorded, with as much at once as their order allows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from onefold.comm import communicator, streams, wires
from onefold.comm.endpoint import Endpoint, StreamPending
from onefold.comm.links import Link
from onefold.comm.mesh import Axis, link_name
from onefold.comm.meter import Label

COMPUTE = "compute"


class Op(NamedTuple):
    """One entry of a stream. An event has a number for each time it was recorded."""

    kind: str  # "record", "wait" or "message"
    what: str
    time: int = 0


class Recording(NamedTuple):
    """What one rank enqueued, by stream, and how often its host waited for the device."""

    program: dict[str, list[Op]]
    host_waits: int


class Recorder:
    """Stands for `TorchStreams` of streams.py."""

    def __init__(self) -> None:
        self.program: dict[str, list[Op]] = defaultdict(list)
        self.current = RecordedStream(self, COMPUTE)
        self.host_waits = 0
        self._made = 0

    def note(self, stream: str, op: Op) -> None:
        self.program[stream].append(op)

    def group(self) -> Any:
        """Stands for a communicator of NCCL."""
        return SilentGroup()

    @property
    def recording(self) -> Recording:
        return Recording(dict(self.program), self.host_waits)

    def number(self) -> int:
        self._made += 1
        return self._made

    def Event(self, device: torch.device) -> RecordedEvent:
        return RecordedEvent(self)

    def Stream(self, device: torch.device, priority: int = 0) -> RecordedStream:
        return RecordedStream(self, f"stream {self.number()}")

    def index(self, device: torch.device) -> int:
        return 0

    def current_stream(self, index: int) -> RecordedStream:
        return self.current

    def set_stream(self, stream: RecordedStream) -> None:
        self.current = stream


class RecordedStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def enqueue(self, op: Op) -> None:
        self._recorder.note(self.name, op)

    def wait_event(self, event: RecordedEvent) -> None:
        event.wait(self)


class RecordedEvent:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._name, self._times = recorder, f"event {recorder.number()}", 0

    def record(self, stream: RecordedStream | None = None) -> None:
        self._times += 1
        (stream or self._recorder.current).enqueue(Op("record", self._name, self._times))

    def wait(self, stream: RecordedStream | None = None) -> None:
        if self._times:
            (stream or self._recorder.current).enqueue(Op("wait", self._name, self._times))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._recorder.host_waits += 1


class SilentGroup:
    """Stands for a communicator of NCCL; its messages carry nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class RecordedLink(Link):
    """Notes each message, on the stream that it is issued on."""

    def __init__(self, recorder: Recorder, name: str, axis: Axis, device: torch.device) -> None:
        super().__init__(name, axis, recorder.group(), device)
        self._recorder = recorder

    def pending(self, endpoint: Endpoint, label: Label, reads: Sequence[Tensor] = ()) -> StreamPending:
        self._recorder.current.enqueue(Op("message", f"{self.name}: {label}"))
        return super().pending(endpoint, label, reads)


@contextmanager
def recorded(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """On a rank: models that are sharded and trained inside enqueue their messages as over NCCL, on a recorder."""
    recorder = recorder or Recorder()

    links: dict[str, RecordedLink] = {}

    def link_of(axis: Axis, kind: str, device: torch.device, timeout_s: float) -> RecordedLink:
        name = link_name(kind, axis)
        return links.setdefault(name, RecordedLink(recorder, name, axis, device))

    def wire_for(
        endpoint: Endpoint, device: torch.device, timeout_s: float, *, one_link: str | None = None
    ) -> wires.Wire:
        return wires.NcclWire(endpoint, device, timeout_s, one_link=one_link)

    with (
        patch.dict(streams.STREAMS, {"cpu": recorder}),
        patch.object(wires, "link_of", link_of),
        patch.object(communicator, "wire_for", wire_for),
    ):
        yield recorder


def circle(recordings: list[Recording]) -> str:
    """Runs what all ranks enqueued. Empty if it runs to its end; else what each stream waits for then."""
    programs = [recording.program for recording in recordings]
    left = {(rank, name): ops[::-1] for rank, program in enumerate(programs) for name, ops in program.items()}
    passed: dict[tuple[int, str], int] = {}
    sizes = _sizes(programs)
    moved = True
    while moved:
        moved = False
        waiting: dict[str, list[tuple[int, str]]] = defaultdict(list)  # message -> the streams that have come to it
        for (rank, name), ops in left.items():
            while ops and (ops[-1].kind == "record" or passed.get((rank, ops[-1].what), 0) >= ops[-1].time > 0):
                op, moved = ops.pop(), True
                if op.kind == "record":
                    passed[rank, op.what] = op.time
            if ops and ops[-1].kind == "message":
                waiting[ops[-1].what].append((rank, name))
        for message, where in waiting.items():
            if len(where) == sizes[message.split(":")[0]]:
                moved = True
                for stream in where:
                    left[stream].pop()
    return "\n".join(f"rank {rank}, {name}: {ops[-1]}, {len(ops)} left" for (rank, name), ops in left.items() if ops)


def _sizes(programs: list[dict[str, list[Op]]]) -> Counter[str]:
    """How many ranks have each link."""
    sizes: Counter[str] = Counter()
    for program in programs:
        sizes.update({op.what.split(":")[0] for ops in program.values() for op in ops if op.kind == "message"})
    return sizes
