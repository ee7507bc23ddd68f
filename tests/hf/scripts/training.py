"""The Trainer as scripts use it: as it is, as a subclass of the script's own, for encoders with decoders, and TRL's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from data import Sentences
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Doubling(Trainer):
    """A subclass as users write them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return (2 * found[0], found[1]) if return_outputs else 2 * found


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def train(folder: str, args: TrainingArguments, *, cls: type[Trainer] = Trainer, **changes: Any) -> dict[str, Any]:
    """Trains a causal language model, evaluates it, and generates, each rank from a prompt of its own length."""
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = cls(
        model=model, args=dataclasses.replace(args, **changes), train_dataset=Sentences(64), eval_dataset=Sentences(9)
    )
    trainer.train()
    prompt = torch.tensor([[5, 6, 7][: 2 + args.process_index]])
    tokens = trainer.model.generate(prompt.to(args.device), max_new_tokens=4, do_sample=False, pad_token_id=0)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate()["eval_loss"]
    return {"losses": losses(trainer), "rates": rates, "evaluated": evaluated, "generated": tokens.tolist()}


def train_seq2seq(folder: str, args: TrainingArguments) -> dict[str, Any]:
    set_seed(7)
    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    trainer = Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(folder),
        args=Seq2SeqTrainingArguments(**given, predict_with_generate=True, generation_max_length=5),
        train_dataset=Sentences(64),
    )
    trainer.train()
    return {"losses": losses(trainer), "predicted": trainer.predict(Sentences(5)).predictions.tolist()}


def train_sft(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{(i * 7 + j) % 50}" for j in range(4 + i % 5))} for i in range(32)]
    trainer = SFTTrainer(
        model=folder, args=SFTConfig(**settings, max_length=16), train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    accuracies = [row["mean_token_accuracy"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses(trainer), "accuracies": accuracies}


def train_dpo(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": f"w{i % 50} w3", "chosen": f" w{i % 7} w1", "rejected": f" w{i % 11}"} for i in range(32)]
    trainer = DPOTrainer(
        model=folder, args=DPOConfig(**settings, max_length=16), train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return {"losses": losses(trainer)}
