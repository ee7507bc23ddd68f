"""The machine this process runs on, as a row of the hardware table."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess

import torch

from onefold.cost.hardware import TABLE, Hardware


def here(device: torch.device) -> Hardware:
    """The row of this device, or of the nearest one, with the memory that this device really has."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type != "cuda":
        row = dataclasses.replace(TABLE["laptop"], name="this machine's CPU", memory_bytes=host // ranks)
    else:
        found = torch.cuda.get_device_properties(device)
        known = [row for row in TABLE.values() if row.name.split()[0] in found.name]
        row = dataclasses.replace(known[0] if known else TABLE["a100-80"], name=found.name)
        row = dataclasses.replace(row, memory_bytes=found.total_memory)
    return dataclasses.replace(row, host_bytes=host, node_ranks=max(ranks, 1))


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
