"""transformers' Trainer at stage 3: one line differs from a script without Onefold.

    torchrun --nproc-per-node 2 examples/trainer.py --output_dir tuned
    torchrun --nproc-per-node 2 examples/trainer.py --output_dir tuned --model tuned

All flags of TrainingArguments are flags of the script. Without `--model` the model is a small Llama with its first
values, so that nothing is downloaded; it learns a source file of Python's, one token per byte.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, TrainingArguments

import onefold
import onefold.hf

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
)  # fmt: skip


@dataclass
class Script:
    model: str | None = field(default=None, metadata={"help": "a Hugging Face folder to start from"})
    text: str = field(default=os.__file__, metadata={"help": "what to learn"})
    length: int = field(default=64, metadata={"help": "tokens per sequence"})
    stage: int = field(default=3, metadata={"help": "of ZeRO"})


class Windows(Dataset[dict[str, Tensor]]):
    """A file's bytes, cut into sequences."""

    def __init__(self, file: Path, length: int) -> None:
        tokens = torch.tensor(list(file.read_bytes()))
        self._rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main(arguments: list[str]) -> list[dict[str, Any]]:
    script, args = HfArgumentParser([Script, TrainingArguments]).parse_args_into_dataclasses(arguments)
    start = AutoModelForCausalLM.from_pretrained if script.model else AutoModelForCausalLM.from_config
    model = start(script.model or SMALL)
    data = Windows(Path(script.text), script.length)
    trainer = onefold.hf.Trainer(  # without Onefold: Trainer(
        model=model, args=args, train_dataset=data, zero=onefold.Zero(stage=script.stage)
    )
    trainer.train()
    trainer.save_model()
    return trainer.state.log_history


if __name__ == "__main__":
    main(sys.argv[1:])
