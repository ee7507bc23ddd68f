"""Token files: a vector of integers, mapped into memory and never read whole.

tokens.bin          bare little-endian integers; the file `tokens.bin.json` beside it says {"dtype": "uint16",
                    "vocab": 50257}, both optional: without it they are uint16 and the vocabulary is looked up
tokens.npy          NumPy's format, one dimension, uint8, uint16, uint32, int32 or int64
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.errors import ConfigError

DTYPES = {
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
NPY = {"|u1": "uint8", "<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}
SUFFIXES = (".bin", ".npy")
PIECE = 1 << 22  # tokens looked at together


class TokenFile(NamedTuple):
    """Where its tokens start, and what they are."""

    path: Path
    dtype: torch.dtype
    offset: int  # bytes
    vocab: int | None

    def tokens(self) -> Tensor:
        """All of them, mapped."""
        size = self.path.stat().st_size
        flat = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)[self.offset :]
        return flat[: len(flat) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)


def open_tokens(path: Path) -> TokenFile:
    try:
        found = _npy(path) if path.suffix == ".npy" else _bin(path)
        size = path.stat().st_size - found.offset
        if size < found.dtype.itemsize:
            raise ConfigError(f"{path} holds no tokens: {max(size, 0)} bytes, and one takes {found.dtype.itemsize}")
    except OSError as error:
        raise ConfigError(f"--data {path} cannot be read: {error.strerror}") from error
    return found


def _bin(path: Path) -> TokenFile:
    beside = path.with_name(path.name + ".json")
    try:
        says: Any = json.loads(beside.read_text()) if beside.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{beside} is no JSON: {error}") from error
    name = says.get("dtype", "uint16") if isinstance(says, dict) else None
    if not isinstance(name, str) or name not in DTYPES or not isinstance(says.get("vocab"), int | None):
        raise ConfigError(f'{beside} should be like {{"dtype": "uint16", "vocab": 50257}}; dtypes: {", ".join(DTYPES)}')
    return TokenFile(path, DTYPES[name], 0, says.get("vocab"))


def _npy(path: Path) -> TokenFile:
    with path.open("rb") as file:
        start = file.read(8)
        wide = start[6:7] != b"\x01"  # the length of the header has 2 bytes in version 1, else 4
        length = int.from_bytes(file.read(4 if wide else 2), "little")
        try:
            header = ast.literal_eval(file.read(length).decode("latin1").strip()) if start[:6] == b"\x93NUMPY" else {}
        except (ValueError, SyntaxError):
            header = {}
    kind, shape = (header.get("descr"), header.get("shape")) if isinstance(header, dict) else (None, None)
    if not isinstance(kind, str) or kind not in NPY or not isinstance(shape, tuple) or len(shape) != 1:
        raise ConfigError(f"{path} is no NumPy file of one dimension and one of {', '.join(DTYPES)}")
    return TokenFile(path, DTYPES[NPY[kind]], 8 + (4 if wide else 2) + length, None)


def pieces(tokens: Tensor) -> Iterator[Tensor]:
    """As int64, a few at a time."""
    for start in range(0, len(tokens), PIECE):
        yield tokens[start : start + PIECE].to(torch.int64)


def largest(tokens: Tensor) -> int:
    return max(int(piece.max()) for piece in pieces(tokens))


def check_range(file: TokenFile) -> None:
    """No token is below 0, or beyond the vocabulary that the file says it has. Reads it once."""
    signed = file.dtype in (torch.int32, torch.int64)
    if not signed and file.vocab is None:
        return
    for number, piece in enumerate(pieces(file.tokens())):
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or (file.vocab is not None and high >= file.vocab):
            wrong = low if low < 0 else high
            at = number * PIECE + int((piece == wrong).nonzero()[0])
            known = f"its vocabulary is {file.vocab}" if file.vocab is not None else "tokens are 0 or more"
            raise ConfigError(f"--data {file.path}: token {wrong} at place {at:,}, but {known}; write the file anew")
