"""The NUMA node of a GPU: the threads that update its state run on the node's cores, and host memory is taken there, so
that neither updates nor transfers cross between sockets.

Only where every node of the machine has a GPU of its ranks: a rank that is alone on two sockets needs the cores and the
memory channels of both. Where the kernel does not tell the node, or forbids the wish, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
PREFERRED = 1  # MPOL_PREFERRED: pages come from other nodes where this one is full


class Node(NamedTuple):
    number: int
    cores: frozenset[int]

    def run_here(self) -> None:
        """Keeps the calling thread, and threads that it starts, on the node's cores."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cores)

    def place(self, address: int, nbytes: int) -> bool:
        """Has whole pages, which are not in use yet, come from the node; False where the kernel forbids it."""
        call = MBIND.get(platform.machine())
        if call is None:
            return False
        words = self.number // 64 + 1
        mask = (ctypes.c_ulong * words)()
        mask[self.number // 64] = 1 << self.number % 64
        libc, long, pointer = ctypes.CDLL(None), ctypes.c_long, ctypes.c_void_p
        given = pointer(address), ctypes.c_ulong(nbytes), PREFERRED, ctypes.byref(mask), ctypes.c_ulong(64 * words + 1)
        return int(libc.syscall(long(call), *given, 0)) == 0


@lru_cache(maxsize=16)
def near(device: int) -> Node | None:
    """The node of this process's GPU with this index, if threads and memory shall be there."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seen = range(ranks) if torch.cuda.device_count() >= ranks else ()  # else each rank sees its own GPU alone
    return chosen(address_of(device), [address_of(other) for other in seen], ranks)


def chosen(mine: str, ranks_gpus: Sequence[str], ranks: int, root: Path = Path("/sys")) -> Node | None:
    """The node of the GPU with PCI address `mine`. `ranks_gpus` are the GPUs of all ranks here, empty if unknown."""
    nodes = _numbers(_text(root / "devices/system/node/has_cpu"))
    number = _node_of(mine, root)
    used = {_node_of(address, root) for address in ranks_gpus}
    if number not in nodes or len(nodes) < 2 or ranks < len(nodes) or (used and not nodes <= used):
        return None
    cores = _numbers(_text(root / f"devices/system/node/node{number}/cpulist")) & os.sched_getaffinity(0)
    return Node(number, frozenset(cores)) if cores else None


def address_of(device: int) -> str:
    """As the kernel names it: domain:bus:device.function."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _node_of(address: str, root: Path) -> int:
    found = _text(root / "bus/pci/devices" / address / "numa_node")
    return int(found) if found.lstrip("-").isdigit() else -1  # -1 also where the machine does not say


def _numbers(text: str) -> set[int]:
    """
    >>> sorted(_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.split("-") for part in text.split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
