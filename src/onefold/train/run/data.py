"""What is trained on: text files or token files, as one vector of tokens on disk, and the windows cut from it.

Text is tokenised once and kept in a cache, under a name made from its content; the first process of a node writes it,
the others wait for it. Tokens are read window by window, so memory does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.errors import ConfigError, OnefoldError
from onefold.offload.host_memory import bytes_of
from onefold.train.run.cache import Cache
from onefold.train.run.digest import Digests, hash_files, read_pieces
from onefold.train.run.groups import DataSettings
from onefold.train.run.sampling import Windows
from onefold.train.run.source import STANDARD_LIBRARY, Source, find_source
from onefold.train.run.stored import Tokens
from onefold.train.run.tokenizer import Tokenizer, find_tokenizer
from onefold.train.run.tokens import PIECE, check_range, vocab_of

BETWEEN = b"\n\0\n"  # separator between files
BASELINE_VOCAB = 4096  # beyond it a table of pairs is too large
PRIOR = 16.0  # how many sightings the baseline's prior is worth


class Prepared(NamedTuple):
    """Data that were read once, and tokenised if they are text."""

    digests: Digests
    entry: str | None  # the name of the tokens in the cache; None for token files, which are read where they are
    left_out: str


class Data(NamedTuple):
    """Tokens, ready to train on."""

    source: str
    tokenizer: str
    vocab: int
    tokens: Tokens
    windows: Windows

    def batch(self, chosen: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows."""
        size = self.windows.seq + 1
        rows = [self.tokens[start : start + size] for start in map(self.windows.start, chosen)]
        both = torch.stack(rows)
        return both[:, :-1], both[:, 1:]


def prepare(settings: DataSettings, own: Path | None = None) -> Prepared:
    """Hash the data, and tokenise what is not in the cache yet. Other processes may do the same at once.

    `own` is the run's folder, which is left out of the data.
    """
    source = find_source(settings, own)
    if source.tokens:
        for file in source.tokens:
            check_range(file)
        return Prepared(Digests(hash_files(source, settings.cache), "", ""), None, source.left_out)
    tokenizer, cache = find_tokenizer(settings.tokenizer), Cache(settings.cache)
    digests = Digests(hash_files(source, settings.cache), tokenizer.digest, "")
    entry = f"{digests.cache_key}.tokens"
    found = cache.find(entry)
    if found is None:
        cache.write(entry, _tokenised(source, digests, tokenizer))
        found = cache.find(entry)
    if found is None:
        raise OnefoldError(f"the cache {cache.folder} does not keep what is written to it; try --cache")
    return Prepared(digests._replace(tokens=found.sha256), entry, source.left_out)


def _tokenised(source: Source, digests: Digests, tokenizer: Tokenizer) -> Iterator[memoryview]:
    for number, (path, file) in enumerate(zip(source.files, digests.files, strict=True)):
        between = (BETWEEN,) if number else ()
        for tokens in tokenizer.encode(chain(between, read_pieces(path, file.sha256))):
            if len(tokens):
                yield bytes_of(tokens)


def load_data(settings: DataSettings, seq: int, entry: str | None, own: Path | None = None) -> Data:
    """What `prepare` has made."""
    path = settings.data
    name = STANDARD_LIBRARY if path is None else str(path)
    if entry is None:
        files = find_source(settings, own).tokens
        if not files:
            raise ConfigError(f"--data {name} is no token file any more; start again when nobody writes to it")
        return _data(settings, seq, name, "tokens", vocab_of(files), Tokens([file.stretch() for file in files]))
    tokenizer, cache = find_tokenizer(settings.tokenizer), Cache(settings.cache)
    found = cache.find(entry, verify=False)  # already verified by the node's first process
    if found is None:
        raise OnefoldError(f"{cache.folder / entry} is not there any more; who empties the cache? start again")
    if not found.size:
        raise ConfigError(f"--data {name} is empty")
    return _data(settings, seq, name, tokenizer.name, tokenizer.vocab, found.tokens(tokenizer.dtype))


def _data(settings: DataSettings, seq: int, source: str, tokenizer: str, vocab: int, tokens: Tokens) -> Data:
    windows = Windows.of(tokens=len(tokens), seq=seq, val_fraction=settings.val_fraction)
    return Data(source, tokenizer, vocab, tokens, windows)


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
        for at in range(start, stop, PIECE):
            piece = data.tokens[at : min(at + PIECE, stop)]
            pairs += torch.bincount(piece[:-1] * vocab + piece[1:], minlength=vocab * vocab)
    table = pairs.view(vocab, vocab)
    single = (table.sum(0) + 1) / (table.sum() + vocab)
    rows = (table + PRIOR * single) / (table.sum(1, keepdim=True) + PRIOR)
    inputs, targets = data.batch(evaluated)
    return float(-rows[inputs, targets].log().mean())
