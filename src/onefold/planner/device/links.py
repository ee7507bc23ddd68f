"""All-gathers and reduce-scatters by size, between the ranks that run this together; of CPU ranks also the time that
their cores take to move one, which is time in which they do not compute."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of, init
from onefold.comm.meter import Label, Meter
from onefold.planner.device.clock import Clock

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)  # bytes that all ranks have together
ROUNDS, WARM_UP = 5, 2  # the same on all ranks
LONGEST_S = 0.5  # a message that takes longer is the last: over a slow link larger ones would say nothing new
PATIENCE_S = 60.0
ON_CORES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of all ranks: messages whose CPU time is measured
SIDE = 384  # of the matrices whose products run beside a message


def links(clock: Clock) -> dict[str, Any]:
    """Rows of bytes of all ranks together, and seconds; empty for one rank. Those of `cores` are CPU seconds of an
    all-gather, of the rank that takes more. Collective."""
    init(timeout_s=PATIENCE_S)
    comm = Comm(axes_of(None).shard, clock.device, PATIENCE_S, Meter())
    if comm.size == 1:
        return {}
    comm.connect()
    found: dict[str, Any] = {"ranks": comm.size, "all_gather": [], "reduce_scatter": []}
    for nbytes in SIZES[:3] if clock.quick else SIZES:
        shard = max(64, nbytes // 2 // comm.size)
        flat = torch.ones(shard * comm.size, dtype=torch.bfloat16, device=clock.device)
        scratch = torch.empty(comm.scratch_numel(shard, flat.dtype), dtype=flat.dtype, device=clock.device)

        def gather(flat: torch.Tensor = flat) -> None:
            comm.all_gather(flat, Label("measure", "links")).wait()

        def reduce(flat: torch.Tensor = flat, scratch: torch.Tensor = scratch) -> None:
            comm.reduce_scatter(flat, scratch, Label("measure", "links")).wait()

        for name, work in (("all_gather", gather), ("reduce_scatter", reduce)):
            found[name].append([flat.numel() * flat.itemsize, _median_s(clock, comm, work)])
        slow = found["all_gather"][-1][1] > LONGEST_S
        if any(comm.all_gather_bytes(bytes([slow]), Label("measure", "go on"))[rank][0] for rank in range(comm.size)):
            break
    if not clock.cuda:
        within = [size for size in ON_CORES if size <= found["all_gather"][-1][0]]
        found["cores"] = [[size, _cores_s(comm, size, dict(found["all_gather"])[size])] for size in within]
    return found


def _cores_s(comm: Comm, nbytes: int, message_s: float) -> float:
    """CPU seconds that an all-gather adds to a rank that computes meanwhile, with those of the kernel's networking in
    its context: where it interrupts compute, that takes longer."""
    flat, square = torch.ones(nbytes // 4), torch.randn(SIDE, SIDE)

    def compute(products: int) -> None:
        for _ in range(products):
            square @ square

    def cpu_s(message: bool, products: int) -> float:
        comm.all_gather_bytes(b"1", Label("measure", "start together"))
        began = time.process_time()
        pending = comm.all_gather(flat, Label("measure", "links")) if message else None
        compute(products)
        if pending is not None:
            pending.wait()
        return time.process_time() - began

    compute(2)
    products = max(1, round(message_s / (cpu_s(False, 10) / 10)))
    products = max(struct.unpack("q", one)[0] for one in _all(comm, struct.pack("q", products)))
    added = [cpu_s(True, products) - cpu_s(False, products) for _ in range(WARM_UP + 2 * ROUNDS)]
    mine = max(0.0, statistics.median(added[WARM_UP:]))
    return max(struct.unpack("d", one)[0] for one in _all(comm, struct.pack("d", mine)))


def _all(comm: Comm, blob: bytes) -> list[bytes]:
    return comm.all_gather_bytes(blob, Label("measure", "links"))


def _median_s(clock: Clock, comm: Comm, work: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + ROUNDS):
        comm.all_gather_bytes(b"", Label("measure", "start together"))
        times.append(clock.wall_s(work))
    return sorted(times[WARM_UP:])[ROUNDS // 2]
