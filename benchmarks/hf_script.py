"""A script of transformers alone, which benchmarks.hf_trainer runs under `python -m onefold.hf`.

It trains a causal model of a shape on random tokens with transformers' Trainer, and writes how long the steps after the
warm-up took together.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Qwen2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass
class Script:
    shape: str
    length: int
    warm_up: int
    results: str


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """The same rows in every process."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._tokens = torch.randint(vocabulary, (64, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._tokens[index % len(self._tokens)]
        return {"input_ids": row, "labels": row}


class Stopwatch(TrainerCallback):
    """Seconds from the end of the warm-up to the end of the last step; the device is waited for at these two only."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.began = self.ended = 0.0

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._warm_up:
            self.began = now()
        if state.global_step == state.max_steps:
            self.ended = now()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def build(shape: str) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[shape]), attn_implementation="sdpa")


def main(words: list[str]) -> None:
    script, args = HfArgumentParser([Script, TrainingArguments]).parse_args_into_dataclasses(words)
    data = RandomTokens(SHAPES[script.shape]["vocab_size"], script.length)
    watch = Stopwatch(script.warm_up)
    trainer = Trainer(model=build(script.shape), args=args, train_dataset=data, callbacks=[watch])
    loss = trainer.train().training_loss
    Path(script.results).write_text(json.dumps({"seconds": watch.ended - watch.began, "loss": loss}))


if __name__ == "__main__":
    main(sys.argv[1:])
