"""Weights of other programs: a safetensors file or a Hugging Face folder, read by name and range like a checkpoint.

Pickle files are refused, since reading pickle runs code from the file. The error names the command that imports such a
file in a process that may only read tensors.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onefold.checkpoint.format.folder import step_of
from onefold.checkpoint.format.manifest import VALUE, ParamRecord
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import DTYPE_NAMES, HEADER_BYTES_LIMIT, TensorFile, unique
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError
from onefold.model.element_order import contiguous_stride

INDEX = ".safetensors.index.json"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


class Weights:
    """The tensors of some safetensors files. Headers are read at once; tensors by `read`."""

    def __init__(self, storage: Storage, files: Mapping[Path, list[str] | None]) -> None:
        """`files` has the names of the tensors to take from each file; None takes all."""
        self.homes: dict[str, TensorFile] = {}
        self.records: dict[str, ParamRecord] = {}
        for path, names in files.items():
            file = TensorFile(storage, path)
            for name in file.blocks if names is None else names:
                if name not in file.blocks:
                    raise CheckpointDamaged(f"{path} has no tensor {name!r}, which the index finds there")
                block = file.blocks[name]
                self.homes[name] = file
                states = {VALUE: DTYPE_NAMES[block.dtype]}
                self.records[name] = ParamRecord(name, "imported", block.shape, contiguous_stride(block.shape), states)

    def read(self, name: str, span: Span, out: Tensor, state: str = VALUE) -> None:
        assert state == VALUE
        self.homes[name].read(name, span, out)


def open_weights(storage: Storage, path: Path) -> Weights | None:
    """The weights of another program at this path; None if there are none, as in a folder of Onefold's checkpoints."""
    if not storage.is_folder(path):
        if not storage.exists(path):
            raise CheckpointError(f"{path} does not exist; wanted is a folder of checkpoints or a safetensors file")
        if path.suffix in PICKLES or _looks_pickled(storage, path):
            raise refusal(path, "is a pickle file")
        return Weights(storage, {path: None})
    names = storage.names(path)
    if any(step_of(name) is not None for name in names):  # a folder of checkpoints, whatever else is in it
        return None
    indexes = [name for name in names if name.endswith(INDEX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{path} holds {len(indexes)} indexes: {', '.join(indexes)}; name one file of weights")
    if indexes:
        return Weights(storage, _read_index(storage, path / indexes[0]))
    if "manifest.json" in names:
        return None
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {', '.join(files[:5])} and no *{INDEX}; name one file")
    if files:
        return Weights(storage, {path / files[0]: None})
    _refuse_pickles(path, names)
    return None


def _looks_pickled(storage: Storage, path: Path) -> bool:
    """Whether the first bytes are those of a zip file, as torch.save writes, or of pickle. A safetensors file begins
    with a length whose upper half is zero."""
    if storage.size(path) < 8:
        return False
    head = bytearray(8)
    storage.read(path, 0, memoryview(head))
    return head.startswith((b"PK\x03\x04", b"\x80")) and any(head[4:])


def _read_index(storage: Storage, path: Path) -> dict[Path, list[str] | None]:
    size = storage.size(path)
    if size > HEADER_BYTES_LIMIT:
        raise CheckpointDamaged(f"{path} has {size:,} bytes; at most {HEADER_BYTES_LIMIT:,} are read")
    text = bytearray(size)
    storage.read(path, 0, memoryview(text))
    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is no JSON: {error}") from error
    weights: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointDamaged(f"{path} has no weight_map")
    files: dict[Path, list[str] | None] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointDamaged(f"{path} finds {name!r} in {file!r}; wanted is a safetensors file beside it")
        of_file = files.setdefault(path.parent / file, [])
        assert of_file is not None
        of_file.append(name)
    return files


def _refuse_pickles(path: Path, names: list[str]) -> None:
    if ".metadata" in names:
        raise refusal(path, "is a torch DCP folder, whose metadata is pickle")
    if "zero_to_fp32.py" in names:
        raise refusal(path, "is a DeepSpeed folder, which holds pickle")
    for name in names:
        if name.endswith(PICKLES):
            raise refusal(path / name, "is a pickle file")


def refusal(path: Path, what: str) -> CheckpointError:
    command = shlex.join(["onefold", "import-checkpoint", str(path), "imported"])
    return CheckpointError(
        f"{path} {what}; reading pickle runs whatever its author put in, so onefold.load does not. Import it "
        f"once, in a process that may only read tensors, and load the folder imported:\n  {command}"
    )
