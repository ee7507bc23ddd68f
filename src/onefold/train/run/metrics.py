"""What a run measures: one row of metrics per logged step, and warnings."""

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
    compute_s: float  # of a step, without waits for messages: the median of all ranks
    slowest_s: float
    slowest_rank: int
    time: float = 0.0  # seconds since 1970


class Listener:
    """Is told of a run's progress; this base class ignores everything."""

    def began(self, facts: dict[str, Any], step: int) -> None:
        """Called before the first step of this start; `step` steps are done already."""

    def stepped(self, step: int) -> None: ...

    def row(self, row: Row) -> None: ...

    def warned(self, ranks: list[int], kind: str, message: str) -> None: ...

    def ended(self) -> None: ...


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def memory_now(model: nn.Module, peak: dict[str, int] | None) -> dict[str, int | None]:
    """Bytes this rank holds between steps, and at the peak: `peak` if memory was tracked, on CUDA what the allocator
    reports."""
    now = memory(model)
    sizes: dict[str, int | None] = {name: getattr(now, name).measured for name in CATEGORIES[:-1]}
    sizes |= {"host": now.host, "disk": now.disk} if now.elsewhere else {}
    if engine_of(model).device.type == "cuda":
        most = torch.cuda.max_memory_allocated()
        return {**sizes, "activations": max(0, most - now.total), "peak": most}
    return {**sizes, "activations": peak["activations"] if peak else None, "peak": sum(peak.values()) if peak else None}


def in_use(device: torch.device) -> int:
    """Bytes of device memory in use; on a CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * 4096


def traffic_now(model: nn.Module) -> tuple[dict[str, int], int]:
    """Bytes sent in the last step by purpose, and the number of calls."""
    sent = traffic(model)
    return sent.by_purpose, sum(flow.calls for flow in sent.flows.values())


def flops_per_token(shape: Shape) -> float:
    """Flops of forward and backward per token: 6 per parameter, and what attention adds."""
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.hidden * shape.seq


def peak_flops(device: torch.device, narrow: bool) -> float | None:
    """Peak flops per second in 16 bits; None for fp32, or for a device that is not in the hardware table."""
    if device.type != "cuda" or not narrow:
        return None
    name = torch.cuda.get_device_name(device)
    return next((row.flops for row in TABLE.values() if row.device == "cuda" and row.name.split()[0] in name), None)


def latency(comm: Comm) -> float:
    """Seconds of an all-gather of one byte: the median of several. Collective."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        comm.all_gather_bytes(b"?", Label("latency", "a byte"))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@contextmanager
def collect_warnings(add: Callable[[str, str], None]) -> Iterator[None]:
    """Passes Python's warnings, and what Onefold logs as a warning or worse, to `add(kind, message)`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            add("log", record.getMessage())

    handler, log = Handler(logging.WARNING), logging.getLogger("onefold")
    propagated = log.propagate
    log.addHandler(handler)
    log.propagate = False
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            add(category.__name__, str(message))

        warnings.showwarning = show
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.propagate = propagated
