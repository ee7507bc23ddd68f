"""Our files are safetensors files: the library reads what we write, and we read what it writes, whole or in part."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.checkpoint.format import tensorfile
from onefold.checkpoint.format.manifest import Entry, FileRecord, RankPart
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import CHUNK_BYTES, DTYPES, Block, TensorFile, write_tensors
from onefold.checkpoint.format.verify import Arriving
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError


def some(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.arange(numel * dtype.itemsize, dtype=torch.int64).to(torch.uint8).view(torch.uint8).view(dtype)


def tensors() -> dict[str, torch.Tensor]:
    found = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return found | {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 4), "ünïcode/[0]": torch.ones(1)}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_the_library_reads_every_dtype_and_shape_that_we_write(tmp_path):
    blocks = [Block(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors().items()]
    chunks = [part for tensor in tensors().values() for part in tensor.reshape(-1).split(4) if part.numel()]
    written = write_tensors(Storage(), tmp_path / "a.safetensors", blocks, chunks)
    assert written.bytes == (tmp_path / "a.safetensors").stat().st_size
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert bits(read[name]) == bits(tensor)


def test_we_read_every_dtype_and_shape_that_the_library_writes(tmp_path):
    safetensors.torch.save_file(tensors(), tmp_path / "a.safetensors", metadata={"format": "pt", "made": "there"})
    file = TensorFile(Storage(), tmp_path / "a.safetensors")
    assert file.blocks.keys() == tensors().keys()
    for name, tensor in tensors().items():
        out = torch.empty(tensor.numel(), dtype=tensor.dtype)
        file.read(name, Span(0, tensor.numel()), out)
        assert file.blocks[name].shape == tuple(tensor.shape) and bits(out) == bits(tensor)


def test_a_dtype_that_the_format_lacks_is_a_named_error(tmp_path):
    block = Block("w", torch.complex128, (1,))
    with pytest.raises(CheckpointError, match=r"w is torch\.complex128, which safetensors cannot hold"):
        write_tensors(Storage(), tmp_path / "a.safetensors", [block], [torch.ones(1, dtype=torch.complex128)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_range_is_read_and_checked_however_it_was_written(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("range") / "a.safetensors"
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]))
    numel = data.draw(st.integers(1, 300))
    whole = some(dtype, numel)
    with small_chunks(64):
        parts = whole.split(data.draw(st.integers(1, 300)))
        written = write_tensors(Storage(), path, [Block("x", dtype, (numel,))], parts)
        raw = bits(whole)
        assert written.sha256["x"] == tuple(
            hashlib.sha256(raw[at : at + 64]).hexdigest() for at in range(0, len(raw), 64)
        )
        start = data.draw(st.integers(0, numel))
        stop = data.draw(st.integers(start, numel))
        out = torch.empty(stop - start, dtype=dtype)
        TensorFile(Storage(), path).read("x", Span(start, stop), out, written.sha256["x"])
        assert bits(out) == bits(whole[start:stop])


class small_chunks:
    """Digests of a few bytes each, so that small tensors have many."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(tensorfile, "CHUNK_BYTES", self._size)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def test_a_range_is_checked_by_its_own_chunks_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    numel = 3 * CHUNK_BYTES
    written = write_tensors(
        Storage(), path, [Block("x", torch.uint8, (numel,))], some(torch.uint8, numel).split(1 << 20)
    )
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")  # in the last of three
    out = torch.empty(10, dtype=torch.uint8)
    TensorFile(Storage(), path).read("x", Span(CHUNK_BYTES - 5, CHUNK_BYTES + 5), out, written.sha256["x"])
    assert bits(out) == bits(some(torch.uint8, numel)[CHUNK_BYTES - 5 : CHUNK_BYTES + 5])
    with pytest.raises(CheckpointDamaged, match="tensor x: bytes 8,388,608 to 12,582,912"):
        TensorFile(Storage(), path).read("x", Span(numel - 9, numel - 8), out[:1], written.sha256["x"])


def test_writing_and_reading_take_memory_for_one_chunk_however_large_the_file(tmp_path):
    path, chunk, times = tmp_path / "a.safetensors", torch.zeros(1 << 20), 64

    def chunks() -> Iterator[torch.Tensor]:
        for _ in range(times):
            yield chunk

    tracemalloc.start()
    written = write_tensors(Storage(), path, [Block("x", torch.float32, (times << 20,))], chunks())
    file = TensorFile(Storage(), path)
    for start in range(0, times << 20, 1 << 20):
        file.read("x", Span(start, start + (1 << 20)), chunk, written.sha256["x"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert Path(path).stat().st_size > 256 << 20 and peak < 2 << 20


# -- checked while it comes --------------------------------------------------------------------------------------------


def take_in_pieces(data: bytes, part: RankPart, size: int) -> None:
    arriving = Arriving("rank-00000.safetensors", part)
    for start in range(0, len(data), size):
        arriving.take(memoryview(data)[start : start + size])
    arriving.check()


def test_a_file_that_comes_in_pieces_of_any_size_is_as_it_was_written_or_refused(tmp_path):
    path, values = tmp_path / "rank-00000.safetensors", torch.arange(CHUNK_BYTES // 4 + 1000, dtype=torch.float32)
    entries = [Entry(name, "value", 0, count, path.name) for name, count in (("w", values.numel()), ("b", 3), ("c", 1))]
    blocks = [Block(entry.key, torch.float32, (entry.stop,)) for entry in entries]
    written = write_tensors(Storage(), path, blocks, [*values.split(1 << 20), values[:3], values[5:6]])
    filled = [entry._replace(sha256=written.sha256[entry.key]) for entry in reversed(entries)]
    part = RankPart(FileRecord(path.name, written.bytes, written.header_sha256), filled, [])
    data = path.read_bytes()
    for size in (len(data), 1 << 20, 4099, 101):
        take_in_pieces(data, part, size)
    chance = random.Random(0)
    tail = len(data) - 16  # the last two tensors
    for at in (0, 7, 8, 100, tail, *(chance.randrange(len(data)) for _ in range(20)), len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        with pytest.raises(CheckpointDamaged, match=r"rank-00000\.safetensors"):
            take_in_pieces(bytes(changed), part, 1 << 20)
    for wrong in (b"", data[:4], data[:-1], data + b"0", data[:200] + data[204:] + data[:4]):
        with pytest.raises(CheckpointDamaged, match=r"rank-00000\.safetensors"):
            take_in_pieces(wrong, part, 1 << 20)
