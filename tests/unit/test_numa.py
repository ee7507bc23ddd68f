"""The NUMA node of a GPU: which one is chosen, and what threads and memory get from it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

import pytest
import torch

from onefold.offload.numa import Node, address_of, chosen, near

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2  # MPOL_F_ADDR
ONE, OTHER, UNKNOWN = "0000:1b:00.0", "0000:9a:00.0", "0000:ff:00.0"


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """What the kernel says of two sockets with a GPU each; the first has a core of this process."""
    mine = min(os.sched_getaffinity(0))
    for node, cores in enumerate((str(mine), "4094-4095")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    (tmp_path / "devices/system/node/has_cpu").write_text("0-1\n")
    for address, number in ((ONE, 0), (OTHER, 1), (UNKNOWN, -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{number}\n")
    return tmp_path


def test_ranks_on_both_sockets_keep_to_their_own(two_sockets: Path) -> None:
    found = chosen(ONE, [ONE, OTHER], 2, two_sockets)
    assert found == Node(0, frozenset({min(os.sched_getaffinity(0))}))
    assert chosen(ONE, [], 2, two_sockets) == found  # where each rank sees its own GPU alone


@pytest.mark.parametrize(
    ("mine", "gpus", "ranks"),
    [
        pytest.param(ONE, [ONE], 1, id="a rank that is alone uses both"),
        pytest.param(ONE, [ONE, ONE], 2, id="a socket without ranks"),
        pytest.param(UNKNOWN, [UNKNOWN, OTHER], 2, id="the machine does not say"),
        pytest.param("0000:77:00.0", [], 2, id="a GPU that the kernel does not list"),
        pytest.param(OTHER, [ONE, OTHER], 2, id="its cores are not allowed to this process"),
    ],
)
def test_else_threads_and_memory_go_anywhere(two_sockets: Path, mine: str, gpus: list[str], ranks: int) -> None:
    assert chosen(mine, gpus, ranks, two_sockets) is None


def test_one_socket_is_left_as_it_is(tmp_path: Path) -> None:
    assert chosen(ONE, [ONE], 8, tmp_path) is None


def test_a_thread_stays_on_the_cores_and_others_do_not() -> None:
    before, found = os.sched_getaffinity(0), []
    one = frozenset({min(before)})

    def run() -> None:
        Node(0, one).run_here()
        inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [one]  # as threads of OpenMP, which the first update starts
    assert os.sched_getaffinity(0) == before


def test_pages_come_from_the_node() -> None:
    pages = mmap.mmap(-1, 1 << 20)
    view = ctypes.c_char.from_buffer(pages)
    if not Node(0, frozenset({0})).place(ctypes.addressof(view), 1 << 20):
        pytest.skip("this kernel or container does not allow mbind")
    mode, mask = ctypes.c_int(-1), ctypes.c_ulong(0)
    number, of = ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.c_void_p(ctypes.addressof(view))
    asked = ctypes.byref(mode), ctypes.byref(mask), ctypes.c_ulong(64), of, ctypes.c_ulong(OF_ADDRESS)
    assert ctypes.CDLL(None).syscall(number, *asked) == 0
    assert (mode.value, mask.value) == (1, 1)  # preferred, node 0


@pytest.mark.gpu
def test_the_kernel_lists_a_gpu_by_its_address() -> None:
    assert (Path("/sys/bus/pci/devices") / address_of(torch.cuda.current_device())).is_dir()
    assert near(0) is None or near(0).cores  # type: ignore[union-attr]
