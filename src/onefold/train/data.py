"""What is trained on: text files or token files, as one mapped vector of tokens, and the windows cut from it.

Text is tokenised once and kept in a cache, under a name made from what it was made from; the first process of a node
writes it, the others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from onefold.errors import ConfigError, OnefoldError
from onefold.tiers.memory import bytes_of
from onefold.train.sampling import Windows
from onefold.train.settings import BYTES, DataSettings
from onefold.train.tokens import SUFFIXES, TokenFile, check_range, largest, open_tokens, pieces

BETWEEN = b"\n\0\n"  # files
LOOK = 8192  # bytes of a file that are looked at for a zero, which text has not
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # in the standard library's folder
LEFT_OUT = {  # of a folder: one, and many
    "binary file": "binary files",
    "empty file": "empty files",
    "hidden file or folder": "hidden files or folders",
    "link to a folder": "links to folders",
    "pipe, device or dead link": "pipes, devices or dead links",
}
BASELINE_VOCAB = 4096  # beyond it a table of pairs is too large
PRIOR = 16.0  # how many sightings the baseline's prior is worth
STANDARD_LIBRARY = "the Python standard library"


class Source(NamedTuple):
    """What to read."""

    name: str
    files: tuple[Path, ...] = ()  # of text
    tokens: TokenFile | None = None
    left_out: str = ""  # of a folder, and why


class Tokenizer(NamedTuple):
    """Text to tokens."""

    name: str
    vocab: int
    digest: str
    encode: Callable[[bytes], Tensor]


class Data(NamedTuple):
    """Tokens, ready to train on."""

    source: str
    tokenizer: str
    vocab: int
    tokens: Tensor
    windows: Windows
    left_out: str = ""

    def batch(self, chosen: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows."""
        size = self.windows.seq + 1
        rows = [self.tokens[start : start + size] for start in map(self.windows.start, chosen)]
        both = torch.stack([row.to(torch.int64) for row in rows])
        return both[:, :-1], both[:, 1:]


def find_source(settings: DataSettings) -> Source:
    """What --data means; raises if it is not there."""
    path = settings.data
    if path is None:
        return Source(STANDARD_LIBRARY, tuple(_standard_library(Path(sysconfig.get_path("stdlib")))))
    if path.suffix in SUFFIXES and path.is_file():
        return Source(str(path), tokens=open_tokens(path))
    if path.is_dir():
        files, left_out = _texts(path)
        if not files:
            raise ConfigError(f"--data {path}: no file in it is text" + (f"; left out: {left_out}" if left_out else ""))
        return Source(str(path), files, left_out=left_out)
    if not path.exists():
        raise ConfigError(f"--data {path} is not there; give a text file, a folder, or a .bin or .npy file of tokens")
    return Source(str(path), (path,))


def _standard_library(root: Path) -> Iterator[Path]:
    """Its sources, without tests and without what others installed."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in NOT_OURS and not name.startswith("."))
        paths = (Path(folder) / name for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.suffix == ".py" and path.is_file())


def _texts(root: Path) -> tuple[tuple[Path, ...], str]:
    """All text files below a folder of the user's; and how many of what are left out, in words."""
    files, left_out = [], dict.fromkeys(LEFT_OUT, 0)
    for folder, inner, names in os.walk(root, onerror=_unreadable):
        seen = [name for name in sorted(inner) if not name.startswith(".")]
        left_out["hidden file or folder"] += len(inner) - len(seen)
        left_out["link to a folder"] += sum(Path(folder, name).is_symlink() for name in seen)  # it may lead back here
        inner[:] = seen
        for path in (Path(folder) / name for name in sorted(names)):
            why = _not_text(path)
            if why is None:
                files.append(path)
            else:
                left_out[why] += 1
    said = (f"{count:,} {what if count == 1 else LEFT_OUT[what]}" for what, count in left_out.items() if count)
    return tuple(files), ", ".join(said)


def _not_text(path: Path) -> str | None:
    """Why a file is left out, in a word of LEFT_OUT."""
    if path.name.startswith("."):
        return "hidden file or folder"
    if not path.is_file():
        return "pipe, device or dead link"
    try:
        with path.open("rb") as file:
            start = file.read(LOOK)
    except OSError as error:
        _unreadable(error)
    return "empty file" if not start else "binary file" if b"\0" in start else None


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"--data: {error.filename} cannot be read: {error.strerror}") from error


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def find_tokenizer(name: str) -> Tokenizer:
    if name == BYTES:
        return Tokenizer(BYTES, 256, BYTES, _bytes)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--tokenizer {name} is neither 'bytes' nor a tokenizers file (tokenizer.json)")
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise ConfigError("a tokenizers file needs one more package: pip install 'onefold[tokenizers]'") from error
    text = path.read_bytes()
    try:
        loaded: Any = Loaded.from_str(text.decode())
    except Exception as error:  # it raises plain Exception
        raise ConfigError(f"--tokenizer {name} is no tokenizers file: {str(error).splitlines()[0]}") from error
    vocab = vocab_of(loaded)
    dtype = torch.uint16 if vocab <= 1 << 16 else torch.int32

    def encode(piece: bytes) -> Tensor:
        return torch.tensor(loaded.encode(piece.decode(errors="replace")).ids, dtype=torch.int64).to(dtype)

    return Tokenizer(str(path), vocab, hashlib.sha256(text).hexdigest(), encode)


def vocab_of(loaded: Any) -> int:
    """Of a tokenizers file: ids may have gaps, so a count of them says too little."""
    return max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def prepare(settings: DataSettings) -> Path | None:
    """Tokenise what is not in the cache yet, and say where it is. Other processes may do the same at once."""
    source = find_source(settings)
    if source.tokens is not None:
        check_range(source.tokens)
        return None
    tokenizer = find_tokenizer(settings.tokenizer)
    path = _cached(settings, source, tokenizer)
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as out:
                for piece in _read(source):
                    tokens = tokenizer.encode(piece)
                    out.write(bytes_of(tokens) if len(tokens) else b"")
            draft.replace(path)
        except OSError as error:
            raise OnefoldError(f"the cache {path.parent} cannot be written: {error.strerror}; try --cache") from error
        finally:
            draft.unlink(missing_ok=True)
    return path


def load_data(settings: DataSettings, seq: int) -> Data:
    """What `prepare` has made, mapped."""
    source = find_source(settings)
    if source.tokens is not None:
        tokens = source.tokens.tokens()
        return _data(settings, seq, source.name, "tokens", source.tokens.vocab or largest(tokens) + 1, tokens)
    tokenizer = find_tokenizer(settings.tokenizer)
    path = _cached(settings, source, tokenizer)
    size = path.stat().st_size
    if not size:
        raise ConfigError(f"--data {source.name} is empty")
    dtype = tokenizer.encode(b"").dtype
    tokens = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(dtype)
    return _data(settings, seq, source.name, tokenizer.name, tokenizer.vocab, tokens)._replace(left_out=source.left_out)


def _data(settings: DataSettings, seq: int, source: str, tokenizer: str, vocab: int, tokens: Tensor) -> Data:
    windows = Windows.of(tokens=len(tokens), seq=seq, val_fraction=settings.val_fraction)
    return Data(source, tokenizer, vocab, tokens, windows)


def _read(source: Source) -> Iterator[bytes]:
    for number, path in enumerate(source.files):
        try:
            yield (BETWEEN if number else b"") + path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--data: {path} cannot be read: {error.strerror}") from error


def _cached(settings: DataSettings, source: Source, tokenizer: Tokenizer) -> Path:
    """A name for these tokens: files by path, size and time, so that nothing is read to find it."""
    about = [tokenizer.digest]
    for path in source.files:
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"--data: {path} cannot be read: {error.strerror}") from error
        about.append(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}")
    name = hashlib.sha256("\n".join(about).encode(errors="surrogateescape")).hexdigest()[:24]
    return (settings.cache or default_cache()) / f"{name}.tokens"


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onefold"


def bigram_loss(data: Data, evaluated: Iterable[int]) -> float | None:
    """The loss, on these windows, of a table of pairs counted in the training part; None if it would be too large.

    A pair that was never seen has the probability of its second token, which in turn is smoothed by adding one.
    """
    vocab = data.vocab
    if vocab > BASELINE_VOCAB:
        return None
    pairs = torch.zeros(vocab * vocab, dtype=torch.float64)
    size, windows = data.windows.seq + 1, data.windows
    run = (windows.period - 1) * windows.group  # neighbouring windows of the training part
    for first in range(0, windows.train, run):
        start = windows.start(windows.train_window(first))
        stop = start + size * min(run, windows.train - first)
        for piece in pieces(data.tokens[start:stop]):
            pairs += torch.bincount(piece[:-1] * vocab + piece[1:], minlength=vocab * vocab)
    table = pairs.view(vocab, vocab)
    single = (table.sum(0) + 1) / (table.sum() + vocab)
    rows = (table + PRIOR * single) / (table.sum(1, keepdim=True) + PRIOR)
    inputs, targets = data.batch(evaluated)
    return float(-rows[inputs, targets].log().mean())
