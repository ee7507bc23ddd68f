"""Host buffers are of the size that was asked for and given back; what the host can still hold is read right."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from onefold.errors import OffloadError
from onefold.offload.host_memory import ALIGN, available_bytes, bytes_of, check_host, host_bytes, size_text

GIB = 1 << 30


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (1 << 20) + 1, 5 << 20])
def test_buffers_have_exactly_the_size_asked_for_and_are_aligned_and_zero(nbytes):
    buffer = host_bytes(nbytes, pinned=False)
    assert buffer.dtype == torch.uint8 and buffer.device.type == "cpu" and not buffer.is_pinned()
    assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes
    assert buffer.data_ptr() % ALIGN == 0 and not buffer.any()
    assert bytes(bytes_of(buffer.fill_(7))) == b"\7" * nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_taken_when_used_and_given_back_with_the_last_view():
    before = resident_bytes()
    buffer = host_bytes(256 << 20, pinned=False)
    assert resident_bytes() - before < 64 << 20
    view = buffer.fill_(1)[4096:].view(torch.float32)
    del buffer
    gc.collect()
    assert resident_bytes() - before > 192 << 20 and view[-1] != 0
    del view
    assert resident_bytes() - before < 64 << 20


def test_bytes_of_a_tensor_outlive_it():
    view = bytes_of(host_bytes(8192, pinned=False).fill_(7))[4096:]
    gc.collect()
    assert bytes(view) == b"\7" * 4096


def test_a_forked_process_writes_to_its_own():
    view = bytes_of(host_bytes(4096, pinned=False))
    if not (child := os.fork()):
        view[0] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert view[0] == 0


def test_under_fake_tensors_no_memory_is_taken():
    with FakeTensorMode():
        for pinned in (False, True):
            buffer = host_bytes(1 << 50, pinned=pinned)
            assert isinstance(buffer, FakeTensor) and buffer.shape == (1 << 50,)


def test_more_than_the_system_can_address_is_an_error_that_says_so():
    with pytest.raises(
        OffloadError, match=r"get 1,048,576.0 TiB of host memory: Cannot allocate memory; .* are available"
    ):
        host_bytes(1 << 60, pinned=False)


# -- how much is left --------------------------------------------------------------------------------------------------


def test_what_is_available_is_no_more_than_the_machine_says():
    said = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    assert 0 < available_bytes() < said + GIB  # a moment later


def test_what_cannot_fit_is_refused_with_found_wanted_and_remedy():
    check_host(1, "a byte")
    with pytest.raises(OffloadError, match=r"^the state of 8 ranks needs 1,024.0 TiB of host memory, but .* are avail"):
        check_host(1 << 50, "the state of 8 ranks")


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine of 100 GiB, of which 64 are free, as its kernel describes it."""
    meminfo = f"MemTotal: {100 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {64 << 20} kB\nHugePages_Total:       0\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V1_CPU = "32 23 0:28 / /sys/fs/cgroup/cpu rw,nosuid shared:10 - cgroup cgroup rw,cpu\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_a_machine_without_cgroups_has_what_it_says(tmp_path):
    assert available_bytes(machine(tmp_path, {})) == 64 * GIB


def test_a_cgroup_v2_allows_its_limit_less_use_and_what_can_be_dropped_counts_as_free(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": V2,
        "sys/fs/cgroup/job/step/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/job/step/memory.high": "max\n",
        "sys/fs/cgroup/job/step/memory.current": f"{20 * GIB}\n",
        "sys/fs/cgroup/job/step/memory.stat": f"anon 1\nfile 9\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
        "sys/fs/cgroup/job/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.current": f"{90 * GIB}\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 15 * GIB
    files["sys/fs/cgroup/job/step/memory.high"] = f"{24 * GIB}\n"
    assert available_bytes(machine(tmp_path, files)) == 7 * GIB
    files["sys/fs/cgroup/job/memory.max"] = f"{93 * GIB}\n"  # the whole job's
    assert available_bytes(machine(tmp_path, files)) == 3 * GIB
    files["sys/fs/cgroup/job/memory.max"] = f"{80 * GIB}\n"
    assert available_bytes(machine(tmp_path, files)) == 0


def test_a_cgroup_v1_of_a_hybrid_machine_is_found_among_the_others(tmp_path):
    unlimited, unified = 0x7FFFFFFFFFFFF000, V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = {
        "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/else\n0::/\n",
        "proc/self/mountinfo": V1_CPU + V1 + unified,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{unlimited}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{50 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 3 * GIB


def test_inside_a_container_its_own_cgroup_is_the_top_of_what_is_mounted(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n0::/../other\n",
        "proc/self/mountinfo": V1.replace(" / ", " /docker/abc ", 1),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{6 * GIB}\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.0 bytes"), (4096, "4.0 KiB"), (3 << 19, "1.5 MiB"), (20 << 30, "20.0 GiB"), (1 << 50, "1,024.0 TiB")],
)
def test_sizes_are_told_in_the_unit_that_fits(nbytes, text):
    assert size_text(nbytes) == text
