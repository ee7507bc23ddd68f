"""Notes: nested dicts, lists, tuples and plain values that users and modules save, encoded as JSON and tensors.

JSON has no tuples, no numbers as keys, and no infinity; a tagged list stands for them, so that what is loaded equals
what was saved:

    3, "a", true, null    themselves                  ["list", a, b]           ["tuple", a, b]
    ["dict", [k, v], …]   keys are plain values       ["counter", [k, n], …]   as LR schedulers keep
    ["float", "inf"]      what JSON has no word for   ["tensor", key, dtype, shape]
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.format.tensorfile import DTYPE_NAMES, DTYPES
from onefold.errors import CheckpointDamaged, CheckpointError

PLAIN = (bool, int, str, type(None))
DEPTH = 64  # nesting deeper than this is a cycle, or nonsense


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON. Its tensors are added to `tensors` by their paths in it, which start with `where`."""
    if where.count("/") > DEPTH:
        raise CheckpointError(f"{where[:80]}… is nested more than {DEPTH} deep; keep it flatter")
    if type(value) in PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if type(value) in (list, tuple):
        return [type(value).__name__, *(encode(item, f"{where}/{i}", tensors) for i, item in enumerate(value))]
    if type(value) in (dict, Counter, OrderedDict):  # an OrderedDict is loaded as a dict, which is ordered too
        rows = [[_plain_key(key, where), encode(item, f"{where}/{key}", tensors)] for key, item in value.items()]
        return ["counter" if type(value) is Counter else "dict", *rows]
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; use dicts, "
        f"lists and tuples of numbers, strings, booleans, None and tensors (a scheduler's state_dict(), not itself)"
    )


def _encode_tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> Any:
    value = value.detach()
    if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{where} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot hold")
    key = where
    while key in tensors:  # keys 1 and "1" of one dict
        key += "'"
    tensors[key] = value
    return ["tensor", key, DTYPE_NAMES[value.dtype], list(value.shape)]


def _plain_key(key: Any, where: str) -> Any:
    if type(key) in PLAIN:
        return key
    if type(key) is float and math.isfinite(key):
        return key
    raise CheckpointError(f"{where} has a key {key!r}, which a checkpoint cannot hold; use strings or numbers")


def encode_single(value: Any, where: str) -> Any:
    """A single value such as a step count as JSON: a number, or a 0-d tensor as "tensor F32 3.0"."""
    if isinstance(value, Tensor) and value.shape == () and value.dtype in DTYPE_NAMES:
        return f"tensor {DTYPE_NAMES[value.dtype]} {value.item()!r}"
    if type(value) in (bool, int, float, type(None)):
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{where} is {what}, which a checkpoint cannot hold; an optimizer may keep vectors of a parameter's size, "
        f"numbers, and tensors of one number"
    )


def decode_single(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    try:
        _, dtype, text = word.split(" ")
        number = {"True": True, "False": False}[text] if dtype == "BOOL" else float(text)
        whole = not DTYPES[dtype].is_floating_point and dtype != "BOOL"
        return torch.tensor(int(text) if whole else number, dtype=DTYPES[dtype])
    except (ValueError, KeyError) as error:
        raise CheckpointDamaged(f"the manifest holds {word[:80]!r} where a number was wanted") from error


def decode(note: Any, read: Callable[[str, torch.dtype, tuple[int, ...]], Tensor]) -> Any:
    """The value that `encode` was given; `read` gives a tensor by its path."""
    if type(note) in PLAIN or type(note) is float:
        return note
    if not isinstance(note, list) or not note or note[0] not in READERS:
        raise CheckpointDamaged(f"the manifest holds {str(note)[:80]!r} where a tagged value was wanted")
    try:
        return READERS[note[0]](note[1:], read)
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointDamaged(f"the manifest holds a {note[0]} that cannot be read: {error}") from error


def _pairs(rows: Any, read: Any) -> list[tuple[Any, Any]]:
    return [(key, decode(item, read)) for key, item in rows]


def _float(rows: Any, read: Any) -> float:
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[rows[0]]


def _tensor(rows: Any, read: Any) -> Tensor:
    key, dtype, shape = rows
    return read(key, DTYPES[dtype], tuple(int(size) for size in shape))


READERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "list": lambda rows, read: [decode(item, read) for item in rows],
    "tuple": lambda rows, read: tuple(decode(item, read) for item in rows),
    "dict": lambda rows, read: dict(_pairs(rows, read)),
    "counter": lambda rows, read: Counter(dict(_pairs(rows, read))),
    "float": _float,
    "tensor": _tensor,
}
