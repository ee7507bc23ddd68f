"""Stand-ins for classes of other programs that pickled files name: they keep what they were given and do nothing.

A file may name classes of DeepSpeed beside tensors (its loss scaler, addresses of fragments), and the metadata of a DCP
folder is made of torch's dataclasses. None of these classes is imported: an object with their name in place of theirs
holds the arguments and the state that the file gives it.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from typing import Any

import torch

CLASS = "onefold.class"  # the key by which a dict is known to stand for an object
DEEPSPEED = ("deepspeed.", "argparse.Namespace", "numpy.dtype", "numpy.core.multiarray.", "numpy._core.multiarray.")
DCP = ("torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem.", "pathlib.")


class Inert:
    """An object of a class that was not imported."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        """By identity: what it would be equal to is unknown."""
        return id(self)

    args: tuple[Any, ...]
    state: Any


def inert_class(name: str) -> type[Inert]:
    return types.new_class(name, (Inert,))


def plain(value: Any) -> Any:
    """A value as dicts, lists, tuples, numbers, strings and tensors. An Inert becomes a dict that names its class."""
    if isinstance(value, Inert):
        return {CLASS: type(value).__name__, "args": plain(list(value.args)), "state": plain(value.state)}
    if isinstance(value, torch.Size | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype | torch.device | torch.layout):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return None  # never needed, and JSON has no word for them
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value) in (dict, OrderedDict, Counter):
        return {_key(key): plain(item) for key, item in value.items()}
    return value


def _key(key: Any) -> Any:
    return key if isinstance(key, bool | int | float | str | None) else repr(plain(key))
