"""How long a device is busy in a step: with compute, and with copies that stand for messages.

torch's profiler records when operators ran (on a CPU) or kernels (on a GPU). In the rest of the step nothing computes:
it is the time of Python, hooks and launches. A profiled step is slower, so only the times of operators and kernels are
taken from it; the rest is what an unprofiled step takes beyond them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from onefold.comm.mesh import STAND_IN
from onefold.observe.profiling.intervals import Stretch, covered
from onefold.optim.kernels.cpu import UPDATE

TICKS = 1000  # of a microsecond, which is the profiler's unit


class Busy(NamedTuple):
    """Seconds in which a device was busy."""

    compute_s: float
    stand_ins_s: float  # copies that stand for messages


def busy(work: Callable[[], Any], device: torch.device) -> Busy | None:
    """Runs some work, and returns how long its device was busy. None if the profiler cannot record the device."""
    cuda = device.type == "cuda"
    seen = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True)
    with _without_stderr():
        seen.start()
    try:
        work()
        if cuda:
            torch.cuda.synchronize(device)
    finally:
        with _without_stderr():
            seen.stop()
    return _on_cuda(seen.events()) if cuda else _on_cpu(seen.events())


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Inside, stderr is discarded: the profiler's library writes to it directly."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _on_cpu(events: Iterable[Any]) -> Busy:
    named = [(event.name, _stretch(event)) for event in events]
    stand_ins = [stretch for name, stretch in named if name == STAND_IN]
    operators = [stretch for name, stretch in named if name.startswith("aten::") or name == UPDATE]
    waited = covered(stand_ins)
    return Busy(_seconds(covered(operators + stand_ins) - waited), _seconds(waited))


def _on_cuda(events: Iterable[Any]) -> Busy | None:
    """Busy times on a GPU. Copies that stand for messages run beside compute, on streams of their own as messages do:
    their whole time counts as theirs, also where compute ran at the same time."""
    events = list(events)
    kernels = [_stretch(e) for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    if not kernels:
        return None
    launched = [e for e in events if e.device_type == DeviceType.CPU and e.name == STAND_IN]
    waited = round(TICKS * sum(event.device_time_total for event in launched))
    return Busy(_seconds(covered(kernels) - waited), _seconds(waited))


def _stretch(event: Any) -> Stretch[None]:
    times = event.time_range
    return Stretch(round(TICKS * times.start), round(TICKS * times.end), None)


def _seconds(ticks: int) -> float:
    return ticks / TICKS / 1e6
