"""The machine this process runs on, as a row of the hardware table, and the memory of its device that is free."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess

import torch

from onefold.cost.hardware import TABLE, Hardware, hardware, known_row


def here(device: torch.device) -> Hardware:
    """The row of this device, or of the nearest one, with the memory that this device really has."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type != "cuda":
        row = dataclasses.replace(TABLE["laptop"], name="this machine's CPU", memory_bytes=host // ranks)
    else:
        found = torch.cuda.get_device_properties(device)
        row = hardware(known_row(found.name) or "a100-80")
        row = dataclasses.replace(row, name=found.name, memory_bytes=found.total_memory)
    return dataclasses.replace(row, host_bytes=host, node_ranks=max(ranks, 1))


def device_budget(device: torch.device, device_bytes: int | None, ranks: int) -> int:
    """Bytes of a device that training may take. On a GPU: free memory divided among the `ranks` that share it, and what
    this process's allocator has reserved, at most `device_bytes`. On a CPU: `device_bytes`, or all memory."""
    if device.type != "cuda":
        return here(device).memory_bytes if device_bytes is None else device_bytes
    free, _ = torch.cuda.mem_get_info(device)
    mine = free // ranks + torch.cuda.memory_reserved(device)
    return mine if device_bytes is None else min(device_bytes, mine)


def processor() -> str:
    """The name of this machine's processor."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        told = ""
    for line in told.splitlines():
        if line.startswith("Model name:"):
            return line.partition(":")[2].strip()
    return platform.machine()
