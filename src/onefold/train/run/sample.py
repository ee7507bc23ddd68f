"""Text from a trained model: a run's last committed checkpoint, in one process, one token after the other."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from onefold.checkpoint.format.reading import Checkpoint, read_in_order, with_newest
from onefold.checkpoint.format.storage import Storage
from onefold.cost.layout import Span
from onefold.cost.shapes import Shape
from onefold.errors import CheckpointError, ConfigError
from onefold.model.element_order import Order
from onefold.train.run.folder import RunFolder
from onefold.train.run.groups import BYTES
from onefold.train.run.model import GPT
from onefold.train.run.records import read_facts
from onefold.train.run.tokenizer import vocab_of


class Codec(Protocol):
    """Text to tokens and back."""

    vocab: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Pieces of text, each as soon as its tokens are there."""
        ...


class Trained(NamedTuple):
    """A model as it was at a step, and what its tokens mean."""

    model: GPT
    codec: Codec
    step: int


def open_run(run: Path, tokenizer: str | None = None, device: torch.device | str = "cpu") -> Trained:
    """The model of a run at its last committed checkpoint, whatever number of ranks, stage and precision wrote it."""
    facts, folder = read_facts(run), RunFolder(run).checkpoints
    if not Storage().is_folder(folder):
        raise CheckpointError(f"{run} has no checkpoint yet; wait for the first (--save-every), or train it to its end")
    if class_of(facts) != GPT.__name__:
        raise ConfigError(
            f"{run} trained a {class_of(facts)} of transformers, which onefold sample does not run; onefold export "
            f"{run} weights writes a folder for from_pretrained and generate"
        )
    shape, storage = shape_of(run, facts), Storage()
    model, step = with_newest(storage, folder, lambda path: filled(shape, Checkpoint(storage, path)))
    found = facts.get("data")
    name = tokenizer or str(found.get("tokenizer") if isinstance(found, dict) else None)
    return Trained(model.to(device).eval(), codec_of(name, shape.vocab), step)


def class_of(facts: dict[str, Any]) -> str:
    """The name of the class of a run's model."""
    model = facts.get("model")
    return str(model.get("class", GPT.__name__)) if isinstance(model, dict) else GPT.__name__


def shape_of(run: Path, facts: dict[str, Any]) -> Shape:
    model = facts.get("model")
    names = ("layers", "hidden", "heads", "seq", "vocab")
    if not isinstance(model, dict) or not all(type(model.get(name)) is int for name in names):
        raise ConfigError(f"{RunFolder(run).facts} does not tell the model's {', '.join(names)}; was it changed?")
    positions = model.get("positions")
    return Shape(**{name: model[name] for name in names}, positions=positions if type(positions) is int else None)


@torch.no_grad()
def filled(shape: Shape, checkpoint: Checkpoint) -> tuple[GPT, int]:
    """A plain model with every parameter from a checkpoint, and the step it was saved at."""
    for part in shape.parts():  # before there is a model: a shape that someone made up may be of any size
        record = checkpoint.records.get(part.name)
        if record is None or record.numel != part.numel:
            _misfit(checkpoint, part.name, f"{part.numel:,} elements")
    model = GPT(shape)
    for name, param in model.named_parameters():
        record = checkpoint.records[name]
        if tuple(record.shape) != tuple(param.shape):
            _misfit(checkpoint, name, f"{tuple(param.shape)}")
        flat = torch.empty(record.numel, dtype=record.dtype())
        read_in_order(checkpoint, name, Order(tuple(param.shape), tuple(param.stride())), Span(0, record.numel), flat)
        param.copy_(flat.view(param.shape))
    return model, checkpoint.manifest.step


def _misfit(checkpoint: Checkpoint, name: str, wanted: str) -> NoReturn:
    record = checkpoint.records.get(name)
    found = "none of that name" if record is None else f"one of {tuple(record.shape)}"
    raise CheckpointError(f"{checkpoint.folder} should hold {name} of {wanted} and has {found}; is it another model's?")


@torch.no_grad()
def continuation(
    model: GPT, prompt: Sequence[int], *, temperature: float, top_k: int, seed: int, vocab: int | None = None
) -> Iterator[int]:
    """Tokens without end. Each is drawn from the `top_k` likeliest (0: from all), or is the likeliest at temperature 0.

    Chance is drawn on the host, so a seed means the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    device, seq = next(model.parameters()).device, model.shape.seq
    window = list(prompt)[-seq:]
    while True:
        logits = model(torch.tensor([window], device=device))[0, -1].double().cpu()[:vocab]
        token = _choose(logits, temperature, top_k, generator)
        yield token
        window = [*window, token][-seq:]


def add_sample(run: Path, prompt: str, *, tokens: int = 200) -> None:
    """Lets the model of a run's last checkpoint continue a text, and writes that down in the run's folder. The same
    model writes the same."""
    trained = open_run(run)
    given = trained.codec.encode(prompt)
    if not given:
        raise ConfigError(f"{prompt!r} is no token to the run's tokenizer; give it more text")
    found = continuation(trained.model, given, temperature=0.8, top_k=50, seed=0, vocab=trained.codec.vocab)
    said = "".join(trained.codec.decode(islice(found, tokens)))
    path = RunFolder(run).samples
    try:
        with path.open("a") as file:
            file.write(json.dumps({"step": trained.step, "prompt": prompt, "text": said}) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    chances = torch.softmax((best - best[0]) / temperature, 0)
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])


# -- tokens and text ---------------------------------------------------------------------------------------------------


class Bytes:
    """One token per byte; text is UTF-8."""

    vocab = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)


class File:
    """A Hugging Face tokenizers file."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError("a tokenizers file needs one more package: pip install 'onefold[tokenizers]'") from error
        try:
            self._inner: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises plain Exception
            raise ConfigError(f"{path} is no tokenizers file: {str(error).splitlines()[0]}") from error
        self.vocab = vocab_of(self._inner)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """A token may be a part of a character, and how it reads may depend on those before it."""
        seen: list[int] = []
        said = ""
        for token in tokens:
            seen.append(token)
            text = self._inner.decode(seen, skip_special_tokens=False)
            if not text.endswith("\ufffd"):
                yield text[len(said) :]
                said = text
        yield self._inner.decode(seen, skip_special_tokens=False)[len(said) :]


def codec_of(name: str, vocab: int) -> Codec:
    """By what the run says it was trained with."""
    if name == BYTES:
        made: Codec = Bytes()
    elif os.path.isfile(name):  # False, too, where this user may not look
        made = File(Path(name))
    else:
        raise ConfigError(f"tokenizer {name!r} is neither 'bytes' nor a file that is there; give it with --tokenizer")
    if made.vocab > vocab:
        raise ConfigError(f"tokenizer {name} has {made.vocab} tokens, the model knows {vocab}; give the one it had")
    return made
