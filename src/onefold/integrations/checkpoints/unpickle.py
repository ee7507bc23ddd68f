"""The process that reads pickled files for Onefold. Nothing imports this module: `pickled.py` starts it, on its own.

It reads a job from stdin: descriptors of the files to read and of the files to write, all open already. 1 torch's
reader is used once, so that everything is imported  2 the sandbox is entered  3 each file is read by an unpickler that
makes tensors, plain values and inert objects only; tensors are written as safetensors, all else as JSON. Its one answer
on stdout is JSON: which measures the system allowed, or which file was refused, and why.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.format.notes import encode
from onefold.checkpoint.format.storage import Out, Storage
from onefold.checkpoint.format.tensorfile import Block, write_tensors
from onefold.errors import OnefoldError
from onefold.integrations.checkpoints.inert import DCP, DEEPSPEED, inert_class, plain
from onefold.integrations.checkpoints.sandbox import enter

CHUNK_BYTES = 16 << 20
TORCH_NAMES = {"Size": torch.Size, "device": torch.device}


class Refused(OnefoldError):
    """A file that holds more than tensors, or is not what it should be."""


class GivenFile(Storage):
    """Writes to a descriptor that the parent opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def create(self, path: Path, size: int | None = None) -> Out:
        return Out(self, path, self._descriptor)


def main() -> int:
    job = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _load(io.BytesIO(_saved(torch.zeros(1))))
    number = 0
    try:
        measures = enter(job["bytes"])
        for number, one in enumerate(job["files"]):  # noqa: B007  the number says which file was refused
            (_read_dcp if one["parts"] is not None else _read_torch)(one)
    except (MemoryError, RecursionError) as error:
        return _answer({"file": number, "error": f"needs more than it may: {type(error).__name__}"})
    except OnefoldError as error:
        return _answer({"file": number, "error": str(error)})
    except Exception as error:
        return _answer({"file": number, "error": f"is not as expected: {type(error).__name__}: {_line(error)}"})
    return _answer({"measures": measures, "error": None})


def _answer(answer: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(answer))
    return 0


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _load(file: Any, **options: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, **options)


# -- torch.save -----------------------------------------------------------------------------------------------------


def _read_torch(one: dict[str, Any]) -> None:
    path, zipped = f"/proc/self/fd/{one['source']}", os.pread(one["source"], 4, 0) == b"PK\x03\x04"
    mapped = zipped and os.access(path, os.R_OK)  # else all of the file is read into memory
    file: Any = path if mapped else os.fdopen(one["source"], "rb", closefd=False)
    with torch.serialization.safe_globals(_stand_ins(file) if zipped else []):
        value = _loaded(file, mmap=mapped)
    tensors: dict[str, Tensor] = {}
    tree = encode(plain(value), "", tensors)
    aliases, kept, seen = {}, {}, dict[Any, str]()
    for key, tensor in tensors.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        first = seen.setdefault((place, tensor.dtype), key) if tensor.numel() else key
        if first == key:
            kept[key] = tensor
        else:
            aliases[key] = first
    blocks = [Block(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in kept.items()]
    _write(one, {"tree": tree, "aliases": aliases}, blocks, kept.values())


def _stand_ins(file: Any) -> list[Any]:
    """Inert classes under the names that DeepSpeed's files use; raises for any other name that torch would refuse."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        raise _unreadable(error) from error
    if not isinstance(file, str):
        file.seek(0)
    unknown = sorted(name for name in names if not name.startswith(DEEPSPEED))
    if unknown:
        raise Refused(
            f"names {', '.join(unknown[:5])}, which tensors and settings do not need; nothing of it was run. Save "
            f"state dicts of tensors and plain values"
        )
    return [(inert_class(name), name) for name in names]


def _loaded(file: Any, mmap: bool = False) -> Any:
    try:
        return _load(file, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise Refused(f"is refused by torch's reader of tensors: {_cause(error)}; nothing of it was run") from error
    except MemoryError:
        raise
    except Exception as error:  # torch's reader raises many kinds for a file that was cut short or changed
        raise _unreadable(error) from error


def _cause(error: Exception) -> str:
    """What torch's reader met, without its advice to load the file all the same."""
    parts = (line.partition("WeightsUnpickler error:") for line in str(error).splitlines())
    found = [after.strip() for _, mark, after in parts if mark]
    return (found or ["it holds more than tensors and plain values"])[0].rstrip(".")


def _unreadable(error: Exception) -> Refused:
    return Refused(f"cannot be read; it was cut short or is no file of torch.save: {_line(error)}")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _write(one: dict[str, Any], tree: dict[str, Any], blocks: list[Block], tensors: Any) -> None:
    write_tensors(GivenFile(one["tensors"]), Path("tensors"), blocks, _chunks(tensors))
    with os.fdopen(one["tree"], "w") as file:
        json.dump(tree, file)


def _chunks(tensors: Any) -> Iterator[Tensor]:
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        yield from flat.split(CHUNK_BYTES // flat.itemsize) if flat.numel() else ()


# -- DCP ------------------------------------------------------------------------------------------------------------


class MetadataReader(pickle.Unpickler):
    """Makes inert objects of torch's dataclasses, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and name in TORCH_NAMES:
            return TORCH_NAMES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full.startswith(DCP) or full in ("torch.serialization._get_layout", "collections.OrderedDict"):
            return inert_class(name)
        raise Refused(f"names {full}, which the metadata of a DCP folder does not need; nothing of it was run")


def _read_dcp(one: dict[str, Any]) -> None:
    """The tree of a DCP folder has, for each flat key, its path and either a value or the chunks of a tensor."""
    with os.fdopen(one["source"], "rb") as file:
        try:
            metadata = MetadataReader(file).load().state
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise Refused(f"cannot be read; it was cut short or is no metadata of DCP: {_line(error)}") from error
    stored = {_index(key): info.state for key, info in metadata["storage_data"].items()}
    paths = metadata.get("planner_data") or {}
    items: dict[str, Any] = {}
    blocks: list[Block] = []
    places: list[dict[str, Any]] = []
    for key, about in metadata["state_dict_metadata"].items():
        path = list(paths.get(key, [key]))
        if "chunks" not in (about.state or {}):
            tensors: dict[str, Tensor] = {}
            value = _segment(one, key, stored[key, None])
            items[key] = {"path": path, "value": encode(plain(value), key, tensors)}
            if tensors:
                raise Refused(f"holds tensors inside {key!r}, which is no tensor; save them by names of their own")
            continue
        dtype = about.state["properties"].state[0]
        chunks: list[dict[str, list[int]]] = []
        for chunk in about.state["chunks"]:
            offsets, sizes = list(chunk.state["offsets"]), list(chunk.state["sizes"])
            blocks.append(Block(f"{key}|{len(chunks)}", dtype, tuple(sizes)))
            places.append(stored[key, tuple(offsets)])
            chunks.append({"offsets": offsets, "sizes": sizes})
        items[key] = {"path": path, "size": list(about.state["size"]), "dtype": str(dtype), "chunks": chunks}

    def loaded() -> Iterator[Tensor]:
        for block, place in zip(blocks, places, strict=True):
            tensor = _segment(one, block.key, place)
            if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (block.dtype, block.shape):
                raise Refused(f"holds {block.key!r}, which is not the tensor that the metadata describes")
            yield tensor

    _write(one, {"items": items}, blocks, loaded())


def _index(key: Any) -> tuple[str, tuple[int, ...] | None]:
    offset = key.state.get("offset")
    return key.state["fqn"], None if offset is None else tuple(offset)


def _segment(one: dict[str, Any], key: str, place: dict[str, Any]) -> Any:
    """What torch.save wrote into a part of one of the folder's files."""
    name = place["relative_path"]
    if name not in one["parts"]:
        raise Refused(f"finds {key!r} in {name!r}, which is missing")
    if place.get("transform_descriptors"):
        raise Refused(f"holds {key!r} transformed by {place['transform_descriptors']}; save without extensions")
    data = os.pread(one["parts"][name], place["length"], place["offset"])
    if len(data) != place["length"]:
        raise Refused(f"finds {key!r} in {name!r}, which was cut short")
    return _loaded(io.BytesIO(data))
