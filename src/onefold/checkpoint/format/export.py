"""Exports a checkpoint's weights as a Hugging Face folder: safetensors files and their index, written tensor by tensor.

Runs in one process, needs no model, and has one chunk in memory at a time (one tensor, if it is stored in parts or with
strides that safetensors lacks). Like a checkpoint, the folder gets its name when all of it is written. A store has no
renames: there the index of several files comes last, and nobody reads them without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.address import place
from onefold.checkpoint.format.folder import drafted
from onefold.checkpoint.format.manifest import ParamRecord
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.reading import Checkpoint, read_in_order, with_newest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import Block, write_tensors
from onefold.cost.layout import Span
from onefold.errors import CheckpointError, ConfigError
from onefold.model.element_order import contiguous_order

SHARD_BYTES = 5_000_000_000  # what Hugging Face writes by default
CHUNK_BYTES = 16 << 20
NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Exported(NamedTuple):
    """What `export` wrote."""

    folder: Path  # where
    step: int  # of the checkpoint
    files: tuple[str, ...]  # names of the safetensors files
    tensors: int  # how many tensors
    bytes: int  # of all tensors


class Form(NamedTuple):
    """How a tensor is written for another program."""

    name: str
    make: Callable[[Tensor], Tensor]  # its values there, from those here


def export(
    folder: str | Path,
    out: str | Path,
    dtype: str | torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    forms: Mapping[str, Form] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Exported:
    """Writes the weights of the newest checkpoint in `folder`, or of one `step-…`, to the new folder `out`. Tensors
    that `forms` names have another name and form there; `files` are written beside them, by name."""
    source, target, wanted = place(folder), place(out).absolute(), _dtype(dtype)
    if shard_bytes <= 0:
        raise ConfigError(f"shard_bytes={shard_bytes} is not a number of bytes above 0")
    storage = storage_of(target)
    storage.check_access(target)
    if storage.exists(target) and not (storage.is_folder(target) and not storage.names(target)):
        raise CheckpointError(f"{target} exists; name a folder that does not, so that nothing is overwritten")
    found = storage_of(source)
    return with_newest(
        found,
        source,
        lambda path: _export(storage, Checkpoint(found, path), target, wanted, shard_bytes, forms or {}, files or {}),
    )


def _export(
    storage: Storage, checkpoint: Checkpoint, target: Path, wanted: torch.dtype | None, shard_bytes: int,
    forms: Mapping[str, Form], files: Mapping[str, bytes],
) -> Exported:  # fmt: skip
    records = [record for record in checkpoint.manifest.records if record.kind != "extra"]
    shards = _shards([(record, _block(record, wanted, forms.get(record.name))) for record in records], shard_bytes)
    with drafted(storage, target) as draft:
        storage.make_folder(draft)
        for name, content in files.items():
            _write_file(storage, draft / name, content)
        names = _write(storage, draft, checkpoint, shards, forms)
    return Exported(target, checkpoint.manifest.step, names, len(records), _bytes(shards))


Shard = list[tuple[ParamRecord, Block]]


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    known = NARROW.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and known not in NARROW.values():
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(NARROW)}")
    return known


def _block(record: ParamRecord, wanted: torch.dtype | None, form: Form | None) -> Block:
    own = record.dtype()
    parameter = record.kind in ("trained", "frozen") and own.is_floating_point and own.itemsize > 1
    dtype = wanted if wanted and parameter else own
    if form is None:
        return Block(record.name, dtype, record.shape)
    return Block(form.name, dtype, tuple(form.make(torch.empty(record.shape, dtype=dtype, device="meta")).shape))


def _shards(tensors: Sequence[tuple[ParamRecord, Block]], shard_bytes: int) -> list[Shard]:
    """Distributes tensors, in order, to files of at most `shard_bytes`, each as full as it can be."""
    shards: list[Shard] = [[]]
    filled = 0
    for record, block in tensors:
        if shards[-1] and filled + block.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((record, block))
        filled += block.bytes
    for shard in shards:
        # Widest first: then each starts at a multiple of its itemsize.
        shard.sort(key=lambda tensor: -tensor[1].dtype.itemsize)
    return shards


def _names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))


def _chunks(checkpoint: Checkpoint, shard: Shard, forms: Mapping[str, Form]) -> Iterator[Tensor]:
    for record, block in shard:
        for values in _values(checkpoint, record, forms.get(record.name)):
            narrow = values.to(block.dtype)
            if narrow.dtype != values.dtype and bool((narrow.isinf() & values.isfinite()).any()):
                raise CheckpointError(
                    f"{record.name} has values too large for {block.dtype}; export it as bf16 or fp32"
                )
            yield narrow


def _values(checkpoint: Checkpoint, record: ParamRecord, form: Form | None) -> Iterator[Tensor]:
    """The elements of a parameter in row-major order, chunk by chunk, whatever its strides were; in another form, all
    at once."""
    rows = contiguous_order(record.shape)
    alike = record.order.same(rows) and form is None
    step = CHUNK_BYTES // record.dtype().itemsize if alike else max(record.numel, 1)
    scratch = torch.empty(min(step, record.numel), dtype=record.dtype())
    for start in range(0, record.numel, step):
        span = Span(start, min(start + step, record.numel))
        read_in_order(checkpoint, record.name, rows, span, scratch[: span.numel])
        yield scratch[: span.numel] if form is None else form.make(scratch.view(record.shape)).flatten()


def _write(
    storage: Storage, draft: Path, checkpoint: Checkpoint, shards: Sequence[Shard], forms: Mapping[str, Form]
) -> tuple[str, ...]:
    names = _names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_tensors(storage, draft / name, [block for _, block in shard], _chunks(checkpoint, shard, forms))
    if len(shards) > 1:
        _write_index(storage, draft, names, shards)
    storage.sync_folder(draft)
    return names


def _bytes(shards: Sequence[Shard]) -> int:
    return sum(block.bytes for shard in shards for _, block in shard)


def _write_index(storage: Storage, draft: Path, names: Sequence[str], shards: Sequence[Shard]) -> None:
    homes = {block.key: name for name, shard in zip(names, shards, strict=True) for _, block in shard}
    text = json.dumps({"metadata": {"total_size": _bytes(shards)}, "weight_map": homes}, indent=2) + "\n"
    _write_file(storage, draft / "model.safetensors.index.json", text.encode())


def _write_file(storage: Storage, path: Path, content: bytes) -> None:
    with storage.create(path) as out:
        out.write(memoryview(content))
        out.finish()
