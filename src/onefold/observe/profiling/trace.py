"""Reads the Chrome trace of torch's profiler, as far as a breakdown needs it.

gloo's messages outlast the calls that start them, but torch records them in the same row, where viewers expect nested
events. `with_message_rows` gives them rows of their own, named after the span that started them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onefold.comm.spans import PREFIX, read
from onefold.observe.profiling.intervals import Stretch, at, innermost

BACKWARD = "autograd::engine::evaluate_function"  # one node of an autograd graph
OTHERS = ("_c10d_functional::", "c10d_functional::", "c10d::")  # messages that Onefold did not send
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TRAVELLING = "gloo:"  # a message, until it has completed
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
    """Events of each thread and work of the device; times in nanoseconds."""

    threads: dict[int, list[Stretch[str]]]  # events by name
    device: list[Work]


def read_trace(chrome: dict[str, Any]) -> Trace:
    """A Trace from the parsed JSON of a Chrome trace."""
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


def with_message_rows(chrome: dict[str, Any], process: str) -> dict[str, Any]:
    """The Chrome trace for viewers: messages in rows of their own, and the process with its name."""
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
    name_parts = read(name)
    return f"{name_parts.what} {name_parts.of}" if name_parts is not None and name_parts.verb == "start" else around
