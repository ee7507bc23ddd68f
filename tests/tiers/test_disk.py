"""Files on disk hold what was written to them, in order, and let go of what they held."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.errors import StateError
from onefold.offload import disk
from onefold.offload.disk import THREADS, Scratch
from onefold.offload.host_memory import bytes_of, host_bytes
from tests.harness import run_ranks
from tests.tiers.places import filled, in_child

BLOCK = 4096
LATEST_S = 60


@pytest.fixture(params=["direct", "buffered"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scratch]:
    with closing(Scratch(tmp_path, 0, buffered=request.param == "buffered")) as made:
        yield made


@contextmanager
def held(scratch: Scratch) -> Iterator[None]:
    """No thread of it runs a piece meanwhile."""
    go_on, busy = threading.Event(), threading.Barrier(THREADS + 1)

    def wait() -> None:
        busy.wait(LATEST_S)
        go_on.wait(LATEST_S)

    for _ in range(THREADS):
        scratch.workers.pieces.put(wait)
    busy.wait(LATEST_S)
    try:
        yield
    finally:
        go_on.set()


# -- what is in them ---------------------------------------------------------------------------------------------------

FILES = 3
SIZES = st.integers(0, 6).map(lambda blocks: blocks * BLOCK)
STEPS = st.lists(
    st.tuples(st.integers(0, FILES - 1), st.sampled_from(["read", "write", "resize"]), SIZES, st.integers(1, 255)),
    max_size=25,
)


@pytest.mark.parametrize("buffered", [False, True])
def test_files_hold_what_bytes_in_memory_would(tmp_path_factory, monkeypatch, buffered):
    monkeypatch.setattr(disk, "PIECE_BYTES", 2 * BLOCK)  # so that small requests have pieces too
    scratch = Scratch(tmp_path_factory.mktemp("scratch"), 0, buffered=buffered)

    @settings(max_examples=25 if buffered else 75, deadline=None)
    @given(STEPS)
    def follow(steps: list[tuple[int, str, int, int]]) -> None:
        files = [scratch.file(2 * BLOCK, f"file {number}") for number in range(FILES)]
        wanted = [bytes(2 * BLOCK) for _ in range(FILES)]
        asked: list[Any] = []  # nothing is waited for until all is asked
        reads: list[tuple[Any, bytes]] = []
        for number, verb, nbytes, value in steps:
            content, file = wanted[number], files[number]
            if verb == "resize":
                file.resize(nbytes)
                wanted[number] = content[:nbytes].ljust(nbytes, b"\0")
                assert file.nbytes == os.fstat(file.fileno()).st_size == nbytes
                continue
            nbytes = min(nbytes, len(content))
            buffer = filled(nbytes, value)
            if verb == "write":
                asked.append(file.write(buffer))
                wanted[number] = bytes(bytes_of(buffer)) + content[nbytes:]
            else:
                asked.append(file.read(buffer))
                reads.append((buffer, content[:nbytes]))
        for pending in asked:
            pending.wait()
        assert all(bytes(bytes_of(buffer)) == content for buffer, content in reads)

    with closing(scratch):
        follow()


def test_requests_of_many_pieces_come_back_bit_for_bit(scratch):
    generator = torch.Generator().manual_seed(0)
    data = host_bytes(2 * disk.PIECE_BYTES + 5 * BLOCK, pinned=False).random_(generator=generator)
    back = host_bytes(data.numel(), pinned=False)
    file = scratch.file(data.numel(), "the state")
    file.write(data).wait()
    file.read(back).wait()
    assert torch.equal(back, data)


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_read_sees_the_writes_asked_for_before_it_and_none_after(scratch):
    file = scratch.file(BLOCK, "the state")
    seen = [filled(BLOCK, 0) for _ in range(8)]
    with held(scratch):
        for value, buffer in enumerate(seen, start=1):
            file.write(filled(BLOCK, value))
            last = file.read(buffer)
        assert not last.done.is_set()
    last.wait()
    assert [buffer.unique().tolist() for buffer in seen] == [[value] for value in range(1, 9)]


def test_files_do_not_wait_for_each_other(scratch):
    first, second = scratch.file(BLOCK, "one"), scratch.file(BLOCK, "two")
    with held(scratch):
        asked = [first.write(filled(BLOCK, 1)), first.write(filled(BLOCK, 2)), second.write(filled(BLOCK, 3))]
        assert scratch.workers.pieces.qsize() == 2  # ready to run: all but the second of the first file
    for pending in asked:
        pending.wait()


def write_and_read_in(folder: str) -> list[int]:
    rank = dist.get_rank()
    with closing(Scratch(folder, 0)) as scratch:
        files = [scratch.file(64 * BLOCK, f"file {number}") for number in range(4)]
        for pending in [file.write(filled(64 * BLOCK, 10 * rank + n)) for n, file in enumerate(files)]:
            pending.wait()
        dist.barrier()
        back = [filled(64 * BLOCK, 0) for _ in files]
        for pending in [file.read(buffer) for file, buffer in zip(files, back)]:
            pending.wait()
        assert os.listdir(folder) == []
        dist.barrier()
    return [value for buffer in back for value in buffer.unique().tolist()]


def test_processes_share_a_folder_and_nothing_in_it(tmp_path):
    assert run_ranks(2, write_and_read_in, str(tmp_path)) == [[0, 1, 2, 3], [10, 11, 12, 13]]


# -- what they hold ----------------------------------------------------------------------------------------------------


def test_a_buffer_is_held_until_its_request_is_done_and_no_longer(scratch):
    file = scratch.file(BLOCK, "the state")
    buffer = filled(BLOCK, 7)
    alive = weakref.ref(buffer)
    with held(scratch):
        pending = file.write(buffer)
        del buffer
        gc.collect()
        assert alive() is not None
    pending.wait()
    assert alive() is None
    back = filled(BLOCK, 0)
    file.read(back).wait()
    assert back.unique().tolist() == [7]


def test_space_is_taken_when_a_file_is_made_and_given_back_when_it_shrinks(scratch):
    file = scratch.file(256 * BLOCK, "the state")
    assert os.fstat(file.fileno()).st_blocks * 512 >= 256 * BLOCK
    file.resize(1024 * BLOCK)
    assert os.fstat(file.fileno()).st_blocks * 512 >= 1024 * BLOCK
    file.resize(0)
    assert os.fstat(file.fileno()).st_blocks * 512 < 256 * BLOCK


def test_nothing_stays_in_the_page_cache(scratch):
    if subprocess.check_output(["stat", "-f", "-c", "%T", scratch.path], text=True).strip() in ("tmpfs", "ramfs"):
        pytest.skip("here files are page cache and nothing else")
    nbytes = 512 * BLOCK
    file = scratch.file(nbytes, "the state")
    buffer = filled(nbytes, 1)
    for move in (file.write, file.read):
        move(buffer).wait()
        with mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as pages:
            flags = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
            start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(pages))
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), flags) == 0
            del anchor
        assert sum(flag & 1 for flag in flags) == 0


def test_a_file_that_nobody_holds_is_gone_at_once(scratch):
    file = scratch.file(BLOCK, "the state")
    number = file.fileno()
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


def test_a_scratch_that_nobody_holds_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    scratch = Scratch(tmp_path, 0)
    threads = set(threading.enumerate()) - before
    scratch.file(BLOCK, "the state").write(filled(BLOCK, 1)).wait()
    assert len(threads) == THREADS and all(thread.is_alive() for thread in threads)
    del scratch
    for thread in threads:
        thread.join(LATEST_S / THREADS)
    assert not any(thread.is_alive() for thread in threads)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_waits_for_what_runs_and_gives_up_what_does_not(scratch):
    file = scratch.file(BLOCK, "the state")
    back = filled(BLOCK, 1)
    with held(scratch):
        asked = [file.write(filled(BLOCK, 7)), file.read(back)]
        closing_thread = threading.Thread(target=scratch.close)
        closing_thread.start()
        while scratch.workers.why_stopped() is None:
            closing_thread.join(0.001)
        assert closing_thread.is_alive() and os.fstat(file.fileno())
    closing_thread.join(LATEST_S)
    assert all(pending.done.wait(LATEST_S) for pending in asked)
    for pending in asked:
        with pytest.raises(StateError, match="were closed; make another Scratch"):
            pending.wait()
    assert back.unique().tolist() == [1]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fileno())


def test_a_closed_scratch_says_so(scratch):
    file = scratch.file(BLOCK, "the state")
    scratch.close()
    scratch.close()
    for use in (
        lambda: file.read(filled(BLOCK, 0)),
        lambda: file.write(filled(BLOCK, 0)),
        lambda: file.resize(0),
        lambda: scratch.file(BLOCK, "another"),
    ):
        with pytest.raises(StateError, match="were closed"):
            use()


def fork_and_use(folder: str) -> tuple[str, int, list[int]]:
    scratch = Scratch(folder, 0)
    file, buffer = scratch.file(BLOCK, "the state"), filled(BLOCK, 7)
    file.write(buffer).wait()
    reading, writing = os.pipe()
    with held(scratch):  # the worst moment
        pending = file.read(buffer)
        if not (child := os.fork()):
            said = []
            for use in (lambda: file.read(buffer), lambda: file.resize(0), pending.wait):
                try:
                    use()
                except StateError as error:
                    said.append(str(error))
            scratch.close()
            os.write(writing, "\n".join(said).encode())
            os._exit(len(said))
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    buffer.fill_(0)
    file.read(buffer).wait()
    return said, os.waitstatus_to_exitcode(status), buffer.unique().tolist()


def test_a_forked_process_is_told_and_harms_nothing(tmp_path):
    said, refusals, back = in_child(fork_and_use, str(tmp_path))
    assert refusals == 3 and "forked" in said and "spawn" in said
    assert back == [7]
