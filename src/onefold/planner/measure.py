"""What this machine can do, measured in seconds: matrix products, memory, and the link between two of its processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of, init
from onefold.comm.meter import Label, Meter
from onefold.cost.hardware import Hardware
from onefold.cost.machine import here

LINK_BYTES = 32 << 20
PATIENCE_S = 60.0


def measured(device: torch.device | None = None) -> Hardware:
    """A row of the hardware table for this machine. Efficiency is 1: the flop rate is one that was reached."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = here(device)
    cuda = device.type == "cuda"
    rates: dict[str, Any] = {
        "name": f"measured here: {row.name}",
        "flops": flop_rate(device, torch.bfloat16 if cuda else torch.float32),
        "efficiency": 1.0,
        "memory_rate": copy_rate(device),
    }
    if cuda:
        rates["pcie_rate"] = pcie_rate(device)
        rates["host_rate"] = copy_rate(torch.device("cpu"), 1 << 30)
    else:
        rates["node_ranks"] = 2
        rates["node_link"] = link_rate()
        rates["host_rate"] = rates["pcie_rate"] = rates["memory_rate"]
    return dataclasses.replace(row, **rates)


def flop_rate(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    size = size or (8192 if device.type == "cuda" else 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right, device)


def copy_rate(device: torch.device, nbytes: int = 64 << 20) -> float:
    """Bytes read and written per second."""
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / _best_s(lambda: target.copy_(source), device)


def pcie_rate(device: torch.device, nbytes: int = 256 << 20) -> float:
    """From pinned host memory to the device, one way."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / _best_s(lambda: target.copy_(source, non_blocking=True), device)


def link_rate() -> float:
    """Bytes per second each of two processes sends while both do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    peers = [context.Process(target=_exchange, args=(rank, port, queue), daemon=True) for rank in range(2)]
    for peer in peers:
        peer.start()
    rate: float = queue.get(timeout=PATIENCE_S)
    for peer in peers:
        peer.join(PATIENCE_S)
    return rate


def _exchange(rank: int, port: int, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    init(timeout_s=PATIENCE_S)
    comm = Comm(axes_of(None).shard, torch.device("cpu"), PATIENCE_S, Meter())
    flat = torch.ones(2 * LINK_BYTES, dtype=torch.uint8)
    best = _best_s(lambda: comm.all_gather(flat, Label("measure", "link")).wait(), torch.device("cpu"), rounds=5)
    if rank == 0:
        queue.put(LINK_BYTES / best)
    comm.all_gather_bytes(b"done", Label("measure", "end"))


def _best_s(work: Callable[[], Any], device: torch.device, rounds: int = 10) -> float:
    """The shortest of several runs, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
