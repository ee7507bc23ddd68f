"""Token files: vectors of integers, read a slice at a time.

tokens.bin          bare little-endian integers; the file `tokens.bin.json` beside it says {"dtype": "uint16",
                    "vocab": 50257}, both optional: without it they are uint16 and the vocabulary is looked up
tokens.npy          NumPy's format, one dimension, uint8, uint16, uint32, int32 or int64

What a file says of itself is believed only as far as its size allows, and no more than 64 KiB of that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.errors import ConfigError, OnefoldError
from onefold.settings.limited import opened, read_json
from onefold.train.run.stored import Stretch, Tokens

DTYPES = {
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
NPY = {"|u1": "uint8", "<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}
SUFFIXES = (".bin", ".npy")
PIECE = 1 << 22  # tokens looked at together
MOST_BYTES = 1 << 16  # of a header
DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([^'"]{1,8})['"]""")
SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(\s*(\d{1,18})\s*,?\s*\)""")


class TokenFile(NamedTuple):
    """Where its tokens start, and what they are."""

    path: Path
    dtype: torch.dtype
    offset: int  # bytes
    length: int | None  # as its header says; None: up to its end
    vocab: int | None

    def stretch(self) -> Stretch:
        """Where they lie."""
        count = (_size(self.path) - self.offset) // self.dtype.itemsize if self.length is None else self.length
        return Stretch(self.path, self.dtype, self.offset, count)

    def tokens(self) -> Tokens:
        return Tokens([self.stretch()])


def open_tokens(path: Path) -> TokenFile:
    found = _npy(path) if path.suffix == ".npy" else _bin(path)
    size, each = _size(path) - found.offset, found.dtype.itemsize
    if size < each or found.length == 0:
        raise ConfigError(f"{path} holds no tokens: {max(size, 0)} bytes, and one takes {each}")
    if found.length is not None and found.length * each > size:
        raise ConfigError(
            f"{path} says that it holds {found.length:,} tokens, but has bytes for {size // each:,}; is it whole? "
            f"write the file anew"
        )
    return found


def beside(path: Path) -> Path | None:
    """The file that describes a .bin file, if there is one."""
    described = path.with_name(path.name + ".json")
    return described if path.suffix == ".bin" and described.exists() else None


def _bin(path: Path) -> TokenFile:
    described = beside(path)
    if described is None:
        return TokenFile(path, torch.uint16, 0, None, None)
    with _reading(described):
        says = read_json(described, MOST_BYTES)
    name, vocab = (says.get("dtype", "uint16"), says.get("vocab")) if isinstance(says, dict) else (None, None)
    known = vocab is None or (type(vocab) is int and vocab > 0)
    if not isinstance(name, str) or name not in DTYPES or not known:
        raise ConfigError(
            f'{described} should be like {{"dtype": "uint16", "vocab": 50257}}; dtypes: {", ".join(DTYPES)}'
        )
    return TokenFile(path, DTYPES[name], 0, None, vocab)


def _npy(path: Path) -> TokenFile:
    with _reading(path), opened(path, None) as file:
        start = file.read(MOST_BYTES)
    wide = start[6:7] != b"\x01"  # the length of the header has 2 bytes in version 1, else 4
    offset = 12 if wide else 10
    length = int.from_bytes(start[8:offset], "little")
    if start[:6] == b"\x93NUMPY" and offset + length > MOST_BYTES:
        raise ConfigError(f"{path} has a header of {length:,} bytes, where some 100 are usual; write the file anew")
    header = start[offset : offset + length].decode("latin1") if start[:6] == b"\x93NUMPY" else ""
    kind, shape = DESCR.search(header), SHAPE.search(header)
    if kind is None or kind[1] not in NPY or shape is None:
        raise ConfigError(f"{path} is no NumPy file of one dimension and one of {', '.join(DTYPES)}")
    return TokenFile(path, DTYPES[NPY[kind[1]]], offset + length, int(shape[1]), None)


def _size(path: Path) -> int:
    with _reading(path):
        return path.stat().st_size


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an error of reading into a ConfigError that names --data."""
    try:
        yield
    except OnefoldError as error:
        raise ConfigError(f"--data: {error}") from error
    except OSError as error:
        raise ConfigError(f"--data: {path} cannot be read: {error.strerror}") from error


def pieces(tokens: Tokens) -> Iterator[Tensor]:
    """All of them, a few at a time."""
    for start in range(0, len(tokens), PIECE):
        yield tokens[start : start + PIECE]


def vocab_of(files: Sequence[TokenFile]) -> int:
    """What the files say, or the largest token in those that say nothing, which are read once."""
    return max(file.vocab or max(int(piece.max()) for piece in pieces(file.tokens())) + 1 for file in files)


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
