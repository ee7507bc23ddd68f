"""What a Chrome trace of torch's profiler holds, as far as a summary needs it.

gloo's messages outlast the calls that start them, and torch puts them among those all the same, where viewers expect
one event inside the other. `tidied` gives them rows of their own, named after the span that started them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onefold.comm.spans import PREFIX, read
from onefold.observe.profiling.intervals import Stretch, at, innermost

BACKWARD = "autograd::engine::evaluate_function"  # one node of a graph
OTHERS = ("_c10d_functional::", "c10d_functional::", "c10d::")  # messages that are not ours
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TRAVELLING = "gloo:"  # a message, until it has arrived
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Work(NamedTuple):
    """A kernel or a copy on the device."""

    name: str
    start: int
    stop: int
    stream: int
    is_copy: bool
    launched: tuple[int, int] | None  # thread and time


class Trace(NamedTuple):
    """Times in nanoseconds."""

    threads: dict[int, list[Stretch[str]]]  # events by name
    device: list[Work]


def read_trace(chrome: dict[str, Any]) -> Trace:
    """From the parsed file."""
    threads: dict[int, list[Stretch[str]]] = {}
    launches: dict[int, tuple[int, int]] = {}
    work: list[tuple[dict[str, Any], int, int]] = []
    for event in chrome["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start = round(event["ts"] * 1000)
        stop = start + round(event["dur"] * 1000)
        if event["name"].startswith((PREFIX, BACKWARD, *OTHERS)) and isinstance(event["tid"], int):
            if event.get("cat") in ("cpu_op", "user_annotation"):
                threads.setdefault(event["tid"], []).append(Stretch(start, stop, event["name"]))
        elif event.get("cat") in DEVICE:
            work.append((event, start, stop))
        elif event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["tid"], start
    return Trace(threads, [_work(event, start, stop, launches) for event, start, stop in work])


def _work(event: dict[str, Any], start: int, stop: int, launches: dict[int, tuple[int, int]]) -> Work:
    more = event.get("args", {})
    launched = launches.get(more.get("correlation", -1))
    stream = int(more.get("stream", event["tid"]))
    return Work(event["name"], start, stop, stream, event["cat"] == "gpu_memcpy", launched)


def tidied(chrome: dict[str, Any], process: str) -> dict[str, Any]:
    """The same for viewers: messages that travel in rows of their own, and the process by name."""
    starts = {thread: innermost(events, _start) for thread, events in read_trace(chrome).threads.items()}
    events: list[dict[str, Any]] = []
    for number, event in enumerate(chrome["traceEvents"]):
        if event.get("ph") == "X" and event["name"].startswith(TRAVELLING):
            started = at(starts.get(event["tid"], []), round(event["ts"] * 1000))
            name = event["name"] if started is None else f"{event['name']} {started}"
            row = {"cat": "message", "name": name, "id": number, "pid": event["pid"], "tid": event["tid"]}
            events.append({"ph": "b", "ts": event["ts"], **row, "args": event.get("args", {})})
            events.append({"ph": "e", "ts": event["ts"] + event["dur"], **row})
        elif event.get("ph") == "M" and event["name"] == "process_name" and isinstance(event["tid"], int):
            events.append({**event, "args": {"name": f"{process}: {event['args']['name']}"}})
        else:
            events.append(event)
    return {**chrome, "traceEvents": events}


def _start(name: str, around: str | None) -> str | None:
    said = read(name)
    return f"{said.what} {said.of}" if said is not None and said.verb == "start" else around
