"""One GPU: pinned host buffers have the size asked for, are unpinned when freed, and a disk reads straight into them.

Also runs as python -m tests.gpu.test_host_memory.
"""

from __future__ import annotations

import gc
import tempfile
from contextlib import closing

import pytest
import torch

from onefold.offload.disk import Scratch
from onefold.offload.host_memory import ALIGN, host_bytes

pytestmark = pytest.mark.gpu
NBYTES = (96 << 20) + 4096  # torch's own pinned allocator would take 128 MiB


def test_pinned_buffers_have_exactly_the_size_asked_for() -> None:
    for nbytes in (1, 4097, NBYTES):
        buffer = host_bytes(nbytes, pinned=True)
        assert buffer.is_pinned() and buffer.data_ptr() % ALIGN == 0
        assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes


def test_freed_buffers_are_unpinned_so_their_addresses_can_be_pinned_again() -> None:
    seen = set()
    for _ in range(20):
        buffer = host_bytes(NBYTES, pinned=True)
        assert buffer[:: NBYTES // 7].is_pinned() and buffer.untyped_storage().nbytes() == NBYTES
        seen.add(buffer.data_ptr())
        view = buffer[4096:].view(torch.float32)
        del buffer
        assert view.is_pinned(), "the last view keeps it"
        del view
        gc.collect()
    assert len(seen) < 20, "no address came back, so nothing was shown"


def test_copies_to_and_from_pinned_buffers_do_not_wait() -> None:
    device = torch.arange(NBYTES // 8, device="cuda")
    down, up = host_bytes(NBYTES, pinned=True).view(torch.int64), torch.empty_like(device)
    down.copy_(device, non_blocking=True)
    up.copy_(down, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(up, device)


def test_a_disk_reads_into_what_the_gpu_copies_from() -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Scratch(folder, NBYTES)) as scratch:
        file = scratch.file(NBYTES, "the state")
        device = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device="cuda")
        out, back = host_bytes(NBYTES, pinned=True), host_bytes(NBYTES, pinned=True)
        out.copy_(device)
        file.write(out).wait()
        file.read(back).wait()
        assert torch.equal(back.to("cuda", non_blocking=True), device)


if __name__ == "__main__":
    for test in (
        test_pinned_buffers_have_exactly_the_size_asked_for,
        test_freed_buffers_are_unpinned_so_their_addresses_can_be_pinned_again,
        test_copies_to_and_from_pinned_buffers_do_not_wait,
        test_a_disk_reads_into_what_the_gpu_copies_from,
    ):
        test()
        print(f"{test.__name__}: passed")
