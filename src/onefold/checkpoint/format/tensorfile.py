"""Safetensors files: written in constant memory, read by ranges, and checked as hostile input.

    8 bytes    length of the header, little endian
    header     JSON: {key: {"dtype": "F32", "shape": [...], "data_offsets": [start, stop]}}, padded with spaces
    data       the tensors, one after the other in the header's order, no gaps

Every CHUNK_BYTES of a tensor have a SHA-256 of their own, so a range is checked by reading little more than the range,
and an error can name the damaged tensor.

The safetensors library is not used here: it writes a file from a copy of all of it in memory, and reads by mapping,
where a truncated file kills the process instead of raising. Tests compare the two.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.storage import Storage, ends_early
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError
from onefold.offload.host_memory import bytes_of

CHUNK_BYTES = 4 << 20  # a multiple of every itemsize
HEADER_BYTES_LIMIT = 64 << 20  # some 400,000 tensors; a header that claims more is not read
WORTH_A_THREAD_BYTES = 1 << 18
HASHERS = min(4, os.cpu_count() or 1)

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Block(NamedTuple):
    """One tensor in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Written(NamedTuple):
    """A file that was written and flushed."""

    name: str
    bytes: int
    header_sha256: str  # of everything before the data
    sha256: dict[str, tuple[str, ...]]  # by key: of each CHUNK_BYTES of the tensor


# -- writing --------------------------------------------------------------------------------------------------------


def write_tensors(storage: Storage, path: Path, blocks: Sequence[Block], chunks: Iterable[Tensor]) -> Written:
    """Writes the blocks in order. `chunks` yields their elements: 1-D host tensors, each of one block; a chunk may be
    overwritten once the next one is requested. Large chunks (16 MiB) are fastest."""
    header = _header(blocks)
    size = len(header) + sum(block.bytes for block in blocks)
    source = iter(chunks)
    sha256 = {}
    with storage.create(path, size) as out, ThreadPoolExecutor(HASHERS) as hashers:
        out.write(memoryview(header))
        for block in blocks:
            digests, left = Digests(), block.numel
            while left:
                chunk = next(source)
                assert chunk.dtype == block.dtype and chunk.dim() == 1 and chunk.numel() <= left, block
                data = bytes_of(chunk)
                hashing = []
                for sha, part in digests.cut(data):
                    if len(part) < WORTH_A_THREAD_BYTES:
                        sha.update(part)
                    else:
                        hashing.append(hashers.submit(sha.update, part))
                out.write(data)  # while threads hash: both release the GIL
                for done in hashing:
                    done.result()
                left -= chunk.numel()
            sha256[block.key] = digests.hex()
        assert next(source, None) is None, "more chunks than blocks"
        out.finish()
    return Written(path.name, size, hashlib.sha256(header).hexdigest(), sha256)


class Digests:
    """The SHA-256 of each CHUNK_BYTES of one tensor, whose bytes come piece by piece."""

    def __init__(self) -> None:
        self._shas: list[Any] = []
        self._room = 0  # bytes that the last digest still takes

    def cut(self, data: memoryview) -> Iterator[tuple[Any, memoryview]]:
        """Pairs of a digest and the bytes for it; no digest occurs twice, so threads may update them at once."""
        while len(data):
            if not self._room:
                self._shas.append(hashlib.sha256())
                self._room = CHUNK_BYTES
            part, data = data[: self._room], data[self._room :]
            self._room -= len(part)
            yield self._shas[-1], part

    def hex(self) -> tuple[str, ...]:
        return tuple(sha.hexdigest() for sha in self._shas)


def _header(blocks: Sequence[Block]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for block in blocks:
        if block.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{block.key} is {block.dtype}, which safetensors cannot hold; convert it first")
        assert block.key not in table, block
        table[block.key] = {
            "dtype": DTYPE_NAMES[block.dtype],
            "shape": list(block.shape),
            "data_offsets": [start, start + block.bytes],
        }
        start += block.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # data starts at a multiple of 64 bytes
    if len(text) > HEADER_BYTES_LIMIT:
        raise CheckpointError(f"{len(blocks):,} tensors are too many for one file; use more ranks or larger parameters")
    return len(text).to_bytes(8, "little") + text


# -- reading --------------------------------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file to read from. The header is read and checked at once; tensors are read by `read`."""

    def __init__(self, storage: Storage, path: Path, header_bytes_limit: int = HEADER_BYTES_LIMIT) -> None:
        self._storage, self.path = storage, path
        self.bytes = storage.size(path)
        header = self._read_header(header_bytes_limit)
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        self._data = len(header)
        self.blocks: dict[str, Block] = {}
        self._starts: dict[str, int] = {}
        for block, start in self._parse(header[8:]):
            self.blocks[block.key] = block
            self._starts[block.key] = start
        self._check_offsets()

    def read(self, key: str, span: Span, out: Tensor, sha256: Sequence[str] | None = None) -> None:
        """Reads these elements of one tensor, in row-major order; checks them if its digests are given."""
        block, size = self.blocks[key], out.itemsize
        assert out.dtype == block.dtype and out.numel() == span.numel and span.clip(Span(0, block.numel)) == span
        data, wanted = bytes_of(out), Span(span.start * size, span.stop * size)
        start = self._data + self._starts[key]
        if sha256 is None:
            if span.numel:
                self._storage.read(self.path, start + wanted.start, data)
            return

        def read_chunk(index: int) -> None:
            chunk = Span(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, block.bytes))
            part = chunk.clip(wanted)
            target = data[part.start - wanted.start : part.stop - wanted.start]
            whole = target if part == chunk else memoryview(bytearray(chunk.numel))
            self._storage.read(self.path, start + chunk.start, whole)
            if hashlib.sha256(whole).hexdigest() != sha256[index]:
                raise CheckpointDamaged(
                    f"{self.path}: tensor {key}: bytes {chunk.start:,} to {chunk.stop:,} are not those that were "
                    f"written (SHA-256 differs)"
                )
            if whole is not target:
                target[:] = whole[part.start - chunk.start : part.stop - chunk.start]

        chunks = range(wanted.start // CHUNK_BYTES, -(-wanted.stop // CHUNK_BYTES) if span.numel else 0)
        self._storage.each(read_chunk, chunks)

    def end(self, key: str) -> int:
        """The offset in the file at which a tensor ends."""
        return self._data + self._starts[key] + self.blocks[key].bytes

    def _read_header(self, limit: int) -> bytes:
        if self.bytes < 8:
            raise ends_early(self.path, self.bytes, 8)
        length = bytearray(8)
        self._storage.read(self.path, 0, memoryview(length))
        claimed = int.from_bytes(length, "little")
        if claimed > limit:
            raise self._broken(f"claims a header of {claimed:,} bytes; at most {limit:,} are read")
        if 8 + claimed > self.bytes:
            raise ends_early(self.path, self.bytes, 8 + claimed)
        header = bytearray(8 + claimed)
        self._storage.read(self.path, 0, memoryview(header))
        return bytes(header)

    def _parse(self, header: bytes) -> Iterator[tuple[Block, int]]:
        try:
            table = json.loads(header, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"has a header that is no JSON: {error}") from error
        if not isinstance(table, dict):
            raise self._broken("has a header that is no JSON object")
        table.pop("__metadata__", None)
        for key, row in table.items():
            yield self._block(key, row)

    def _block(self, key: str, row: Any) -> tuple[Block, int]:
        dtype = row.get("dtype") if isinstance(row, dict) else None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._broken(f"holds {key!r} of dtype {dtype!r}; known are {', '.join(DTYPES)}")
        shape, offsets = row.get("shape"), row.get("data_offsets")
        if not sizes(shape) or not sizes(offsets) or len(offsets) != 2:
            raise self._broken(f"holds {key!r} with shape {shape!r} at {offsets!r}, which is nonsense")
        block = Block(key, DTYPES[dtype], tuple(shape))
        if offsets[1] - offsets[0] != block.bytes:
            raise self._broken(f"holds {key!r} of {block.bytes:,} bytes between {offsets[0]:,} and {offsets[1]:,}")
        return block, offsets[0]

    def _check_offsets(self) -> None:
        """Raises unless the tensors fill the file without overlap and without gaps."""
        end, last = 0, "the header"
        for key, start in sorted(self._starts.items(), key=lambda item: (item[1], self.blocks[item[0]].bytes)):
            if start != end:
                raise self._broken(f"holds {key!r} at {start:,}, but {last} ends at {end:,}; tensors must touch")
            end, last = start + self.blocks[key].bytes, key
            if self._data + end > self.bytes:
                raise CheckpointDamaged(
                    f"{self.path}: tensor {key} should end at byte {self._data + end:,}, but the file has "
                    f"{self.bytes:,}; it was cut short"
                )
        if self._data + end != self.bytes:
            raise self._broken(f"has {self.bytes:,} bytes, but its tensors end at {self._data + end:,}")

    def _broken(self, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self.path} {why}; it is damaged or no safetensors file")


def unique(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    """For json.loads: raises if a key occurs twice, of which two readers might take different values."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def sizes(value: Any) -> bool:
    """Whether a value is a list of plausible sizes or offsets."""
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
