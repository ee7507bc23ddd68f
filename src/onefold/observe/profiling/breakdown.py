"""Where the time of a step went: from a trace to nanoseconds per part, which add up to the step. No torch, no files.

On a CPU a step is what the training thread does, and every wait for a message is exposed. On a GPU the thread only
launches: there an instant belongs to the kernel that runs on the compute stream, and is named after what the thread was
doing when it launched that kernel. While the compute stream is idle, an instant belongs to the message or copy that
runs on another stream, which is exposed then; or to what the thread waits for; else the device is idle because nothing
was launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from onefold.comm.spans import SpanName, read
from onefold.observe.profiling.intervals import Stretch, at, innermost, shares
from onefold.observe.profiling.trace import BACKWARD, OTHERS, Trace, Work

STEP = "profile"  # the verb of the span around a step
ON_HOST = ("update", "room", "copy", "disk")  # waits that are not for peers


class Part(Enum):
    """What an instant of a step is spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "blocks computed again"
    UPDATE = "clip and update"
    GATHER = "exposed gathers"
    REDUCE = "exposed reductions"
    SMALL = "exposed small messages"
    TENSOR = "tensor parallel messages"
    MESSAGES = "starting and summing messages"
    HOST = "host copies and waits"
    IDLE = "device idle"
    OTHER = "other"


WAITS = (Part.GATHER, Part.REDUCE, Part.SMALL, Part.TENSOR, Part.HOST)


class Spent(NamedTuple):
    """What an instant is spent on, and for which unit."""

    part: Part
    what: str = ""
    of: str = ""


class Breakdown(NamedTuple):
    """One step: the values of `parts` add up to `wall`."""

    name: str
    wall: int
    parts: dict[Part, int]
    exposed: dict[tuple[str, str], int]  # (what was waited for, unit) -> time in which nothing was computed
    beside: int  # time of host updates in other threads during the step


def breakdowns(trace: Trace) -> list[Breakdown]:
    """The breakdown of every step in the trace, in order."""
    steps = [(thread, one) for thread, events in trace.threads.items() for one in events if _verb(one) == STEP]
    if not steps:
        return []
    home = steps[0][0]
    threads = [home, *(t for t, events in trace.threads.items() if t != home and any(map(_is_backward, events)))]
    busy = {thread: innermost(trace.threads[thread], spent_on) for thread in threads}
    between = gaps([event for thread in threads for event in trace.threads[thread]])
    apart = [event for thread, events in trace.threads.items() if thread not in threads for event in events]
    updates = [event for event in apart if _verb(event) == "update"]
    layers: list[list[Stretch[Spent]]] = [*busy.values(), between]
    rest = Spent(Part.OTHER)
    if trace.device:
        layers, rest = _on_device(trace.device, busy, between), Spent(Part.IDLE)
    ordered = sorted((one for _, one in steps), key=lambda one: one.start)
    return [_step(one, layers, rest, updates) for one in ordered]


def _step(
    step: Stretch[str], layers: Sequence[list[Stretch[Spent]]], rest: Spent, updates: list[Stretch[str]]
) -> Breakdown:
    start, stop, name = step
    parts: dict[Part, int] = {}
    exposed: dict[tuple[str, str], int] = {}
    for (part, what, of), time in shares(start, stop, layers, rest).items():
        parts[part] = parts.get(part, 0) + time
        if part in WAITS and part is not Part.SMALL and of:
            unit = of.partition(" (")[0]  # labels of activations add which input of which forward
            exposed[what, unit] = exposed.get((what, unit), 0) + time
    beside = shares(start, stop, [updates], "").items()
    name_parts = read(name)
    return Breakdown(
        name_parts.of if name_parts else "", stop - start, parts, exposed, sum(time for what, time in beside if what)
    )


def spent_on(name: str, around: Spent | None) -> Spent | None:
    """What the time of an event is spent on, given its name and what the event around it is spent on."""
    name_parts = read(name)
    if name_parts is not None:
        return _of_span(name_parts, around)
    if name.startswith(BACKWARD):
        return Spent(Part.BACKWARD)
    if name.startswith(OTHERS) and (around is None or around.part not in (*WAITS, Part.MESSAGES)):
        return Spent(Part.TENSOR)
    return around


def _of_span(name_parts: SpanName, around: Spent | None) -> Spent | None:
    verb, what, of = name_parts
    if verb == "wait":
        return Spent(_wait(what), what, of)
    if verb in ("start", "sum"):
        return Spent(Part.MESSAGES, what, of)
    if verb in ("upload", "download"):
        return Spent(Part.HOST, f"{verb} {what}", of)
    if verb == "forward":
        inside = around is not None and around.part in (Part.BACKWARD, Part.AGAIN)
        return Spent(Part.AGAIN if inside else Part.FORWARD)
    plain = {"again": Part.AGAIN, "close": Part.BACKWARD, "clip": Part.UPDATE, "step": Part.UPDATE}
    part = Part.UPDATE if verb == "update" else plain.get(verb)
    return around if part is None else Spent(part)


def _wait(what: str) -> Part:
    if what in ON_HOST:
        return Part.HOST
    if what == "activation":
        return Part.TENSOR
    return Part.GATHER if what.startswith("gather") else Part.REDUCE if what.startswith("reduce") else Part.SMALL


def gaps(events: Sequence[Stretch[str]]) -> list[Stretch[Spent]]:
    """Times between events that belong to a phase: between two nodes of a backward to backward, between a forward and
    the backward after it (the loss) to forward."""
    found: list[Stretch[Spent]] = []
    before: tuple[int, Part] | None = None  # where the last phase ends
    for event in sorted(events, key=lambda one: (one.start, -one.stop)):
        phase = _phase(event)
        if phase is None or (before is not None and event.stop <= before[0]):
            continue
        if before is not None and phase is Part.BACKWARD and before[1] is not Part.UPDATE and before[0] < event.start:
            found.append(Stretch(before[0], event.start, Spent(before[1])))
        before = event.stop, phase
    return found


def _phase(event: Stretch[str]) -> Part | None:
    if _is_backward(event):
        return Part.BACKWARD
    phases = {"forward": Part.FORWARD, "close": Part.BACKWARD, "clip": Part.UPDATE, "step": Part.UPDATE}
    return phases.get(_verb(event))


def _is_backward(event: Stretch[str]) -> bool:
    return event.label.startswith(BACKWARD)


def _verb(event: Stretch[str]) -> str:
    name_parts = read(event.label)
    return "" if name_parts is None else name_parts.verb


# -- on a device -------------------------------------------------------------------------------------------------------


def _on_device(
    device: Sequence[Work], busy: dict[int, list[Stretch[Spent]]], between: list[Stretch[Spent]]
) -> list[list[Stretch[Spent]]]:
    """Layers in the order in which they claim an instant: kernels on the compute stream, messages and copies on other
    streams, waits of threads."""
    stream = compute_stream(device)
    compute, beside = [], []
    for work in device:
        where = spent_at_launch(work, busy, between)
        if work.stream == stream and not is_message(work):
            compute.append(Stretch(work.start, work.stop, where))
        else:
            beside.append(Stretch(work.start, work.stop, as_exposed(where)))
    waits = [one for stretches in busy.values() for one in stretches if one.label.part in WAITS]
    return [compute, beside, waits]


def compute_stream(device: Sequence[Work]) -> int:
    """The stream whose kernels take longest, without messages."""
    times: dict[int, int] = {}
    for work in device:
        if not work.is_copy and not is_message(work):
            times[work.stream] = times.get(work.stream, 0) + work.stop - work.start
    return max(times, key=times.__getitem__, default=0)


def is_message(work: Work) -> bool:
    return work.name.startswith("nccl")


def spent_at_launch(work: Work, busy: dict[int, list[Stretch[Spent]]], between: list[Stretch[Spent]]) -> Spent:
    """What the thread that launched a kernel was doing at that time."""
    if work.launched is None:
        return Spent(Part.OTHER)
    thread, instant = work.launched
    return at(busy.get(thread, []), instant) or at(between, instant) or Spent(Part.OTHER)


def as_exposed(where: Spent) -> Spent:
    """The part of a step to which a message or copy belongs while it is exposed."""
    return where._replace(part=_wait(where.what)) if where.part is Part.MESSAGES else where
