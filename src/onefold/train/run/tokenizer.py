"""Text to tokens, a piece of a file at a time.

Text is cut at line ends where tokenising 256 characters on each side separately gives the same tokens as together. For
tokenizers whose pre-tokenizer splits at white space no token spans the cut, so the tokens are those of the whole file.
Where no line end passes (a tokenizer that starts every text with a mark of its own; lines of many megabytes) the piece
grows up to MOST_CHARS, and is cut there.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.errors import ConfigError
from onefold.train.run.groups import BYTES
from onefold.train.run.pretrained import CONFIG, TOKENIZER

PIECE_CHARS = 1 << 22
MOST_CHARS = 1 << 24
CONTEXT_CHARS = 256  # on each side of a cut that are tokenised separately and together
TRIES = 64  # line ends that are looked at before the piece grows


class Tokenizer(NamedTuple):
    """Text to tokens."""

    name: str
    vocab: int
    digest: str
    dtype: torch.dtype
    encode: Callable[[Iterator[bytes]], Iterator[Tensor]]  # of one file, in pieces of any size


def find_tokenizer(name: str) -> Tokenizer:
    if name == BYTES:
        return Tokenizer(BYTES, 256, BYTES, torch.uint8, lambda pieces: map(_bytes, filter(None, pieces)))
    path = Path(name)
    if not path.is_file() and path.name == TOKENIZER and (path.parent / CONFIG).is_file():
        raise ConfigError(f"{path.parent} has no {TOKENIZER}; give --tokenizer a tokenizers file, or bytes")
    if not path.is_file():
        raise ConfigError(f"--tokenizer {name} is neither 'bytes' nor a tokenizers file (tokenizer.json)")
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise ConfigError("a tokenizers file needs one more package: pip install 'onefold[tokenizers]'") from error
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer {name} cannot be read: {error.strerror}") from error
    try:
        loaded: Any = Loaded.from_str(text.decode())
        loaded.no_truncation()  # of a model's inputs: here a text is a whole file
        loaded.no_padding()
    except Exception as error:  # it raises plain Exception
        raise ConfigError(f"--tokenizer {name} is no tokenizers file: {str(error).splitlines()[0]}") from error
    vocab = vocab_of(loaded)
    dtype = torch.uint16 if vocab <= 1 << 16 else torch.int32

    def encode(pieces: Iterator[bytes]) -> Iterator[Tensor]:
        for ids in encoded(loaded, decoded(pieces)):
            yield torch.tensor(ids, dtype=torch.int64).to(dtype)

    return Tokenizer(str(path), vocab, hashlib.sha256(text).hexdigest(), dtype, encode)


def vocab_of(loaded: Any) -> int:
    """Of a tokenizers file: ids may have gaps, so a count of them says too little."""
    return max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    """As `bytes.decode(errors="replace")` of all pieces together."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def encoded(
    loaded: Any, texts: Iterable[str], piece_chars: int = PIECE_CHARS, most_chars: int = MOST_CHARS
) -> Iterator[list[int]]:
    """The ids of a file, with the special tokens that the tokenizer puts around a text around the whole file."""

    def plain(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    def independent(left: str, right: str) -> bool:
        return plain(left) + plain(right) == plain(left + right)

    found = cut(texts, independent, piece_chars, most_chars)
    first, second = next(found, ""), next(found, None)
    if second is None:
        yield loaded.encode(first).ids
        return
    before, after = _around(loaded.encode(first.strip()[:CONTEXT_CHARS]))
    yield before
    yield from map(plain, chain((first, second), found))
    yield after


def _around(whole: Any) -> tuple[list[int], list[int]]:
    """The special tokens that are put before and after a text."""
    mask = whole.special_tokens_mask
    if 0 not in mask:
        return whole.ids, []
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return whole.ids[:first], whole.ids[last:]


def cut(
    texts: Iterable[str], independent: Callable[[str, str], bool], piece_chars: int, most_chars: int
) -> Iterator[str]:
    """The same text in pieces of about `piece_chars`, each cut where `independent` says that no token spans the cut."""
    buffer, looked = "", 0
    for text in texts:
        buffer += text
        while len(buffer) >= piece_chars + CONTEXT_CHARS:
            at = _place(buffer, independent, max(looked, piece_chars // 2))
            if at is None:
                looked = len(buffer) - CONTEXT_CHARS
                if len(buffer) < most_chars:
                    break
                at = buffer.rfind("\n", most_chars // 2) + 1 or len(buffer)
            yield buffer[:at]
            buffer, looked = buffer[at:], 0
    if buffer:
        yield buffer


def _place(buffer: str, independent: Callable[[str, str], bool], start: int) -> int | None:
    at = len(buffer) - CONTEXT_CHARS + 1
    for _ in range(TRIES):
        at = buffer.rfind("\n", start, at - 1) + 1
        if not at:
            return None
        left, right = buffer[max(0, at - CONTEXT_CHARS) : at], buffer[at : at + CONTEXT_CHARS]
        blank = not left.strip() or not right.strip()  # blank context tells nothing about its neighbours
        if not blank and independent(left, right):
            return at
    return None
