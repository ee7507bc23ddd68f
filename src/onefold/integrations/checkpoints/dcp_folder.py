"""A folder of torch.distributed.checkpoint (DCP), as FSDP2 saves a model and its optimizer with get_state_dict().

Its metadata names tensors by paths: ("model", "a.weight"), ("optim", "state", "a.weight", "exp_avg"), or flattened
("optim", "state.a.weight.exp_avg"), and says which box of each tensor is stored where.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.cost.layout import Span
from onefold.errors import CheckpointError
from onefold.integrations.checkpoints.foreign import Elements, Foreign, ForeignGroup, ForeignTensor
from onefold.integrations.checkpoints.pickled import StoredTensor, read_dcp_items
from onefold.integrations.checkpoints.torch_files import MODEL, OPTIMIZER, STEP
from onefold.offload.host_memory import bytes_of

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class Box(NamedTuple):
    """A part of a tensor, with the place of its first element in it."""

    tensor: StoredTensor
    offsets: tuple[int, ...]


class Boxes:
    """A tensor that ranks stored in parts."""

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.boxes = sorted(boxes, key=lambda box: box.offsets)
        inside = all(
            start >= 0 and start + size <= full
            for box in boxes
            for start, size, full in zip(box.offsets, box.tensor.shape, self.shape, strict=True)
        )
        found = sum(box.tensor.numel for box in boxes)
        if not inside or found != math.prod(shape):
            raise CheckpointError(f"{name} of shape {self.shape} has {found:,} of {math.prod(shape):,} elements stored")

    def chunks(self) -> Iterator[Tensor]:
        if all(box.tensor.shape[1:] == self.shape[1:] for box in self.boxes):  # cut along the first dim
            for box in self.boxes:
                yield from box.tensor.chunks(Span(0, box.tensor.numel))
            return
        full = torch.empty(self.shape, dtype=self.dtype)
        for box in self.boxes:
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape))
            full[place] = box.tensor.value()
        yield full.view(-1)

    def value(self) -> Tensor:
        parts = list(self.chunks())
        return (torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)).view(self.shape)


def is_dcp(path: Path) -> bool:
    return path.is_dir() and (path / ".metadata").is_file()


def read_dcp(folder: Path, second: Path | None, scratch: Path) -> Foreign:
    """A DCP folder; `second` is the folder of the optimizer, if that was saved on its own."""
    model, optim, rest = _sections(folder, scratch / "model")
    if second is not None:
        if not is_dcp(second):
            raise CheckpointError(f"{second} is no DCP folder: it has no .metadata")
        others, optim, _ = _sections(second, scratch / "optim")
        optim = optim or {(name,): value for name, value in others.items()}
    if not model:
        raise CheckpointError(f"{folder} holds no model under any of {', '.join(MODEL)}")
    states, groups = _optimizer(folder, optim) if optim else ({}, None)
    names = {name for group in groups or () for name in group.names}
    if unknown := sorted((names | states.keys()) - model.keys()):
        raise CheckpointError(f"{folder}: the optimizer has a parameter {unknown[0]!r}, which the model has not")
    also = _tied(model, names)
    aliases = {alias for more in also.values() for alias in more}
    tensors = []
    for name, value in model.items():
        if name not in aliases and isinstance(value, Boxes):
            kind = ("trained" if groups is None or name in names else "frozen") if _floats(value) else "buffer"
            state = states.get(name, {})
            vectors: dict[str, Elements] = {k: v for k, v in state.items() if isinstance(v, Boxes)}
            singles = {key: one for key, one in state.items() if key not in vectors}
            tensors.append(ForeignTensor(name, kind, value, tuple(also.get(name, ())), vectors, singles))
    extra = {name: value.value() if isinstance(value, Boxes) else value for name, value in rest.items()}
    step = next((int(extra[key]) for key in STEP if type(extra.get(key)) is int), None)
    modules = {n.removesuffix("_extra_state").removesuffix("."): v for n, v in model.items() if _is_note(n, v)}
    return Foreign(f"DCP: {folder}", tensors, groups, step, modules=modules, extra=extra)


def _floats(value: Boxes) -> bool:
    return value.dtype.is_floating_point


def _is_note(name: str, value: Any) -> bool:
    return name.split(".")[-1] == "_extra_state" and not isinstance(value, Boxes)


Path_ = tuple[Any, ...]


def _sections(folder: Path, scratch: Path) -> tuple[dict[str, Any], dict[Path_, Any], dict[str, Any]]:
    """The tensors and values of the model by name, those of the optimizer by path, and all others."""
    scratch.mkdir()
    items, file = read_dcp_items(folder, scratch)
    found = {_path(key, item): _item(key, item, file) for key, item in items.items()}
    first = {path[0] for path in found}
    if len(first) == 1 and not first & {*MODEL, *OPTIMIZER} and all(len(path) > 1 for path in found):
        found = {path[1:]: value for path, value in found.items()}  # {"app": AppState(model, optimizer)}
        first = {path[0] for path in found}
    optim = {path[1:]: value for path, value in found.items() if path[0] in OPTIMIZER and len(path) > 1}
    whole = not first & set(MODEL) and not optim  # a state dict of a model, and nothing else
    model, rest = {}, {}
    for path, value in found.items():
        if whole or (path[0] in MODEL and len(path) > 1):
            model[".".join(map(str, path if whole else path[1:]))] = value
        elif path[0] not in OPTIMIZER:
            rest[".".join(map(str, path))] = value
    return model, optim, rest


def _path(key: str, item: Mapping[str, Any]) -> Path_:
    path = tuple(item["path"])
    head, dot, tail = key.partition(".")
    return (head, tail) if path == (key,) and dot and head in (*MODEL, *OPTIMIZER) else path


def _item(key: str, item: Mapping[str, Any], file: TensorFile) -> Any:
    if "value" in item:
        return item["value"]
    boxes = []
    for number, chunk in enumerate(item["chunks"]):
        block = file.blocks[f"{key}|{number}"]
        boxes.append(Box(StoredTensor(file, block.key, block.dtype, block.shape), tuple(chunk["offsets"])))
    if not boxes:
        raise CheckpointError(f"{file.path}: {key} is stored nowhere")
    if item["size"]:
        return Boxes(key, item["size"], boxes[0].tensor.dtype, boxes)
    return boxes[0].tensor  # a single value


def _optimizer(folder: Path, optim: Mapping[Path_, Any]) -> tuple[dict[str, dict[str, Any]], list[ForeignGroup]]:
    """State by parameter, and param groups, from either form of an optimizer's state dict."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}  # flattened: by parameter
    rows: dict[int, dict[str, Any]] = {}
    for path, value in optim.items():
        if path[0] == STATE and len(path) == 3:
            states.setdefault(_fqn(folder, path[1]), {})[path[2]] = value
        elif path == (GROUPS,) and isinstance(value, list):
            rows |= dict(enumerate(value))
        elif path[0] == GROUPS and len(path) == 3:
            rows.setdefault(int(path[1]), {})[path[2]] = value
        elif len(path) == 1 and str(path[0]).startswith((f"{STATE}.", f"{GROUPS}.")):
            kind, _, name = str(path[0]).partition(".")
            name, _, key = name.rpartition(".")
            (states if kind == STATE else settings).setdefault(name, {})[key] = value
        else:
            raise CheckpointError(f"{folder} holds {'.'.join(map(str, path))} of an optimizer; save get_state_dict()'s")
    groups = [
        ForeignGroup([_fqn(folder, name) for name in row[PARAMS]], {k: v for k, v in row.items() if k != PARAMS})
        for _, row in sorted(rows.items())
    ]
    for name, row in settings.items():
        alike = next((group for group in groups if group.settings == row), None)
        if alike is None:
            groups.append(ForeignGroup([name], row))
        else:
            alike.names.append(name)
    return states, groups


def _fqn(folder: Path, name: Any) -> str:
    if not isinstance(name, str):
        raise CheckpointError(
            f"{folder} holds an optimizer whose parameters are numbers; save it with get_state_dict() of "
            f"torch.distributed.checkpoint.state_dict, which names them"
        )
    return name


def _tied(model: Mapping[str, Any], trained: set[str]) -> dict[str, list[str]]:
    """Other names of trained parameters: DCP stores tied weights once for each name, with the same bytes."""
    digests = {_digest(model[name]): name for name in model if name in trained and isinstance(model[name], Boxes)}
    shapes = {model[name].shape for name in digests.values()}
    also: dict[str, list[str]] = {}
    for name, value in model.items() if trained else ():
        if name not in trained and isinstance(value, Boxes) and value.shape in shapes:
            first = digests.get(_digest(value))
            if first is not None:
                also.setdefault(first, []).append(name)
    return also


def _digest(value: Boxes) -> bytes:
    sha = hashlib.sha256(repr((value.shape, value.dtype)).encode())
    for chunk in value.chunks():
        sha.update(bytes_of(chunk))
    return sha.digest()
