"""Evaluation over several ranks returns every sample once, in order, also where the last batch is not full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments


def echo() -> nn.Module:
    """A model that returns its inputs; nobody uses its parameters."""

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(16, 16)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return (torch.zeros((), device=input_ids.device), input_ids) if labels is not None else input_ids

    return Echo()


def collate(samples: list[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(samples), "labels": torch.tensor(samples)}


def in_order(args: TrainingArguments) -> dict[str, bool]:
    """By number of samples and by how often predictions leave the device: whether all came back, in order."""
    found = {}
    for size in (25, 3):
        samples = list(range(size))

        def complete(result: EvalPrediction, samples: list[int] = samples) -> dict[str, bool]:
            return {"complete": result.predictions.tolist() == samples == result.label_ids.tolist()}

        trainer = Trainer(
            model=echo(), args=args, data_collator=collate, eval_dataset=samples, compute_metrics=complete
        )
        for every in (None, 2):
            trainer.args.eval_accumulation_steps = every
            found[f"evaluate {size} {every}"] = trainer.evaluate()["eval_complete"]
            found[f"predict {size} {every}"] = trainer.predict(samples).metrics["test_complete"]
        trainer.args.eval_accumulation_steps = None
    return found
