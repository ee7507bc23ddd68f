"""Host memory: buffers for direct transfers with disks (O_DIRECT) and GPUs (pinned), and how much memory is available.

O_DIRECT needs addresses that are multiples of 4096; a GPU needs pinned pages. Both get pages of their own from the
kernel, exactly as many as are needed: torch's pinned allocator would round up to a power of two. The pages are zero,
and take memory from their first use on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.errors import OffloadError
from onefold.offload.numa import near

ALIGN = 4096  # bytes: what O_DIRECT wants of addresses, offsets and lengths
HOST_SHARE = 0.9  # of what is available


def host_bytes(nbytes: int, *, pinned: bool) -> Tensor:
    """So many zero bytes at an address that is a multiple of ALIGN; freed with the last tensor that views them.

    >>> host_bytes(12345, pinned=False).untyped_storage().nbytes()
    12345
    """
    if nbytes == 0 or isinstance(torch.empty(0, device="cpu"), FakeTensor):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        pages = Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OffloadError(
            f"could not get {size_text(nbytes)} of host memory: {error.strerror}; {size_text(available_bytes())} are "
            f"available; keep less on the host, or raise what this process may take (ulimit -v)"
        ) from error
    with suppress(OSError):  # a kernel without huge pages; with them the first use takes a sixth of the time
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_initialized() and (node := near(torch.cuda.current_device())):
        node.place(buffer.data_ptr(), nbytes)
    if pinned and not pages.pin(buffer.data_ptr(), nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return buffer


class Pages(mmap.mmap):
    """Mapped memory that unpins itself before it is unmapped: a finalizer of the storage would run too late."""

    pinned_at: int | None = None

    def pin(self, address: int, nbytes: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            self.pinned_at = address
        return self.pinned_at is not None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be gone by then
        if self.pinned_at is not None and not is_finalizing():  # CUDA may be gone before Python is
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense host tensor; the view keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def trim_heap() -> None:
    """Returns free pages of this process's heap to the kernel. glibc keeps those with a younger allocation behind them:
    a model that is built one unit at a time, of which a shard stays, would end with all of it resident."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


# -- how much is left --------------------------------------------------------------------------------------------------


def check_host(needed_bytes: int, what: str) -> None:
    """Raises unless so many bytes (of all ranks of this machine together) are available; `what` needs them."""
    found = available_bytes()
    if needed_bytes > found:
        raise OffloadError(
            f"{what} needs {size_text(needed_bytes)} of host memory, but {size_text(found)} are available to this "
            f"process (MemAvailable, or what its cgroup still allows); keep less on the host, move state to disk, use "
            f"more machines, or give the job more memory"
        )


def host_share() -> int:
    """Bytes of host memory that this rank may use: its part of what is available to the ranks of this machine, less a
    reserve."""
    return int(HOST_SHARE * available_bytes()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory available to this process: the machine's, or fewer where its cgroup allows fewer."""
    machine = _counts(root / "proc/meminfo").get("MemAvailable:", 0) * 1024  # the file counts in KiB
    return max(0, min([machine, *_allowed(root)]))


class Names(NamedTuple):
    """Names of files and counters in one version of cgroups."""

    limits: tuple[str, ...]
    used: str
    cached: tuple[str, ...]  # what the kernel drops when others need the memory


VERSIONS = {
    "cgroup": Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "cgroup2": Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


def _allowed(root: Path) -> Iterator[int]:
    """Bytes still allowed by each cgroup of this process, from its own up to the root."""
    for version, folders in _cgroups(root):
        names = VERSIONS[version]
        for folder in folders:
            limits = [limit for name in names.limits if (limit := _number(folder / name)) is not None]
            used = _number(folder / names.used)
            if limits and used is not None:
                counts = _counts(folder / "memory.stat")
                yield min(limits) - used + sum(counts.get(name, 0) for name in names.cached)


def _cgroups(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """For each cgroup version: the folders of this process's memory cgroup and of its ancestors."""
    mine = {}  # /proc/self/cgroup: number:controllers:path, where version 2 is 0::path
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            mine["cgroup" if controllers else "cgroup2"] = Path(path)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        top, mounted = before.split()[3:5]
        version, _, options = after.split()[:3]
        if version == "cgroup2" or (version == "cgroup" and "memory" in options.split(",")):
            whole, folder = mine.get(version, Path("/")), root / mounted.lstrip("/")
            below = whole.relative_to(top) if whole.is_relative_to(top) else Path()  # a container sees only its own
            yield version, [folder / below, *(folder / above for above in below.parents)]


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None  # "max": no limit


def _counts(path: Path) -> dict[str, int]:
    """A file with a name and a number on each line."""
    return {words[0]: int(words[1]) for line in _lines(path) if len(words := line.split()) >= 2}


def size_text(nbytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if nbytes >= unit), (1, "bytes"))
    return f"{nbytes / unit:,.1f} {name}"


UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
