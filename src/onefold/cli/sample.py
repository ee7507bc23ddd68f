"""`onefold sample`: text from a trained model."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import tyro

from onefold.errors import ConfigError, visible
from onefold.train.run.sample import continuation, open_run


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Generate text with the model of a run's last checkpoint, in one process. The same seed gives the same text."""

    folder: tyro.conf.Positional[Path]
    """The --out of `onefold train`."""

    prompt: str = "def "
    """The text to continue."""

    tokens: int = 200
    """Number of tokens to generate."""

    temperature: float = 0.8
    """Sampling temperature; 0 always takes the likeliest token."""

    top_k: int = 50
    """Sample from the likeliest so many tokens; 0: from all."""

    seed: int = 0
    """Seed of the sampling."""

    tokenizer: str | None = None
    """A tokenizers file, or bytes; needed if the run does not record its tokenizer, or the file has moved."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        self._check()
        trained = open_run(self.folder, self.tokenizer, "cuda" if torch.cuda.is_available() else "cpu")
        prompt = trained.codec.encode(self.prompt)
        if not prompt:
            raise ConfigError(f"--prompt {self.prompt!r} is no token to this tokenizer; give it more text")
        tokens = continuation(
            trained.model, prompt, temperature=self.temperature, top_k=self.top_k, seed=self.seed,
            vocab=trained.codec.vocab,
        )  # fmt: skip
        pieces = trained.codec.decode(islice(tokens, self.tokens))
        if self.json:
            said = {"step": trained.step, "prompt": self.prompt, "text": "".join(pieces)}
            sys.stdout.write(json.dumps(said, indent=1) + "\n")
            return 0
        sys.stdout.write(_shown(self.prompt))
        for piece in pieces:
            sys.stdout.write(_shown(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")
        return 0

    def _check(self) -> None:
        if not self.prompt:
            raise ConfigError("--prompt is empty; give at least one character to continue, such as 'def '")
        for name, least in (("tokens", 1), ("top_k", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} is below {least}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature} is no number of at least 0; try 0.8")


def _shown(text: str) -> str:
    """Escapes control characters, which a model may generate and a terminal would obey."""
    return visible(text, also="\n\t")
