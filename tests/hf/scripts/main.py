"""An unmodified script: it knows transformers and TRL, and nothing of what runs it. Rank 0 writes what it found."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ordering import in_order  # beside this file
from training import Doubling, train, train_dpo, train_seq2seq, train_sft
from transformers import HfArgumentParser, TrainingArguments


@dataclass
class Wanted:
    """The script's own arguments."""

    models: str
    results: str
    parts: str = "train,subclass,not averaged,seq2seq,ordering,sft,dpo"


def main() -> None:
    wanted, args = HfArgumentParser((Wanted, TrainingArguments)).parse_args_into_dataclasses()
    causal = f"{wanted.models}/causal"
    trl = {
        "output_dir": args.output_dir, "max_steps": args.max_steps, "use_cpu": args.use_cpu, "report_to": [],
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": args.learning_rate, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    parts = {
        "train": lambda: train(causal, args),
        "subclass": lambda: train(causal, args, cls=Doubling, gradient_accumulation_steps=2),
        "not averaged": lambda: train(causal, args, average_tokens_across_devices=False),
        "seq2seq": lambda: train_seq2seq(f"{wanted.models}/seq2seq", args),
        "ordering": lambda: in_order(args),
        "sft": lambda: train_sft(causal, trl),
        "dpo": lambda: train_dpo(causal, trl),
    }
    found = {name: parts[name]() for name in wanted.parts.split(",")}
    about = {"argv": sys.argv[1:], "main": __name__, "path": sys.path[0], "ranks": args.world_size}
    Path(f"{wanted.results}.{args.process_index}").write_text(json.dumps({**found, "about": about}))


if __name__ == "__main__":
    main()
