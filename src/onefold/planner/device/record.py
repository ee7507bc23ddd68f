"""All parts that are measured, and the record of them: with the device, the versions, the date and the command."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from onefold.cost.machine import processor
from onefold.cost.rates import FORMAT
from onefold.optim.kernels.threads import threads_here
from onefold.planner.device.block import blocks, sustained
from onefold.planner.device.clock import Clock
from onefold.planner.device.engine import host
from onefold.planner.device.links import links
from onefold.planner.device.moving import FILE_BYTES, copies, disk, updates
from onefold.planner.device.passes import attention, elementwise, loss
from onefold.planner.device.products import products
from onefold.version import VERSION

PARTS: dict[str, Callable[[Clock], Any]] = {
    "links": links,
    "products": products,
    "attention": attention,
    "elementwise": elementwise,
    "loss": loss,
    "blocks": blocks,
    "sustained": sustained,
    "updates": updates,
    "copies": copies,
    "host": host,
}
DISK = "disk"  # measured where a folder is given


def measure(
    clock: Clock, command: str, parts: Sequence[str] = (), folder: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """The record of a device: of these parts, or of all. With several ranks, links are measured by all of them, and
    the other parts by rank 0 alone, which keeps the record."""
    began, cuda = time.monotonic(), clock.cuda
    if cuda:
        torch.cuda.set_device(clock.device)
    found: dict[str, Any] = {
        "format": FORMAT,
        "device": torch.cuda.get_device_name(clock.device) if cuda else processor(),
        "kind": clock.device.type,
        "memory_bytes": torch.cuda.mem_get_info(clock.device)[1] if cuda else _host_bytes(),
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "memory_bytes": _host_bytes(),
            "threads": threads_here(),
        },
        "torch_threads": torch.get_num_threads(),
        "versions": {"onefold": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "quick": clock.quick,
    }
    rank = int(os.environ.get("RANK", "0"))
    for name, part in PARTS.items():
        if (parts and name not in parts) or (rank and name != "links"):
            continue
        if name == "products":
            clock.heat()
        start = time.monotonic()
        found[name] = part(clock)
        tell(f"{name}: {time.monotonic() - start:.1f} s")
        if cuda:
            torch.cuda.empty_cache()
    if folder is not None and not rank:
        found[DISK] = disk(folder, 1 << 20 if clock.quick else FILE_BYTES)
    found["left_out"] = [name for name in (*PARTS, DISK) if not found.get(name)]
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def json_of(found: dict[str, Any]) -> str:
    """The record with one line for each row, and numbers of four digits: more are noise."""
    text = json.dumps(_rounded(found), indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([-\d.e+,\s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
