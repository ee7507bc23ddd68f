"""What a run measures of itself: one row per logged step, and what others say beside it."""

from __future__ import annotations

import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.hardware import TABLE
from onefold.cost.shapes import Shape
from onefold.observe.reports import memory, traffic
from onefold.observe.tracker import CATEGORIES
from onefold.runtime.engine import engine_of

TRIES = 20


class Row(NamedTuple):
    """A line of metrics.jsonl."""

    step: int
    loss: float
    val_loss: float | None
    val_ppl: float | None
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    mfu: float | None
    memory: dict[str, int | None]
    traffic_bytes: int
    traffic: dict[str, int]
    loss_scale: float | None
    skipped: int


class Listener:
    """Whoever wants to hear of a run while it runs; this one says nothing."""

    def began(self, facts: dict[str, Any], step: int) -> None:
        """Before the first step; `step` are done already."""

    def stepped(self, step: int) -> None: ...

    def row(self, row: Row) -> None: ...

    def warned(self, ranks: list[int], kind: str, message: str) -> None: ...

    def ended(self) -> None: ...


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def memory_now(model: nn.Module, peak: dict[str, int] | None) -> dict[str, int | None]:
    """Bytes this rank holds between steps, and the fullest instant if somebody looked (on CUDA the allocator does)."""
    now = memory(model)
    sizes: dict[str, int | None] = {name: getattr(now, name).measured for name in CATEGORIES[:-1]}
    sizes |= {"host": now.host, "disk": now.disk} if now.elsewhere else {}
    if engine_of(model).device.type == "cuda":
        most = torch.cuda.max_memory_allocated()
        return {**sizes, "activations": max(0, most - now.total), "peak": most}
    return {**sizes, "activations": peak["activations"] if peak else None, "peak": sum(peak.values()) if peak else None}


def in_use(device: torch.device) -> int:
    """Bytes of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * 4096


def traffic_now(model: nn.Module) -> tuple[dict[str, int], int]:
    """Bytes by purpose of the last step, and its messages."""
    sent = traffic(model)
    return sent.by_purpose, sum(flow.calls for flow in sent.flows.values())


def flops_per_token(shape: Shape) -> float:
    """Forward and backward: two per parameter and pass, and what attention adds."""
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.hidden * shape.seq


def peak_flops(device: torch.device, narrow: bool) -> float | None:
    """Per second, where the table knows the device and 16 bits compute."""
    if device.type != "cuda" or not narrow:
        return None
    name = torch.cuda.get_device_name(device)
    return next((row.flops for row in TABLE.values() if row.device == "cuda" and row.name.split()[0] in name), None)


def latency(comm: Comm) -> float:
    """Seconds until a byte has gone to all and come from all: the median of some tries. Collective."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        comm.all_gather_bytes(b"?", Label("latency", "a byte"))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@contextmanager
def collected(note: Callable[[str, str], None]) -> Iterator[None]:
    """Python's warnings, and what the library logs as a warning or worse, go to `note(kind, message)`."""

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note("log", record.getMessage())

    ear, log = Ear(logging.WARNING), logging.getLogger("onefold")
    passed_on = log.propagate
    log.addHandler(ear)
    log.propagate = False
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            note(category.__name__, str(message))

        warnings.showwarning = show
        try:
            yield
        finally:
            log.removeHandler(ear)
            log.propagate = passed_on
