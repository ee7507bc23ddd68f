"""On a rank: a tiny model trained by transformers' Trainer, plain or sharded, and what is compared afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

import onefold
import onefold.hf
from tests.harness.device import device

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY, LENGTH = 64, 16
STAGES = (0, 1, 2, 3)


class Run(NamedTuple):
    """What a training run logged, and the model's parameters at its end, in rank 0's memory."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


def same(runs: list[Run]) -> bool:
    """True if all runs logged the same numbers and ended with the same bits."""
    first = runs[0]
    return all(
        one.losses == first.losses
        and one.norms == first.norms
        and one.state.keys() == first.state.keys()
        and all(torch.equal(one.state[name], first.state[name]) for name in first.state)
        for one in runs
    )


class Sentences(Dataset):
    """Random tokens, the same on every rank; some of each sentence's labels are ignored."""

    def __init__(self, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index]
        return {"input_ids": tokens, "labels": torch.where(tokens % 7 == index % 7, -100, tokens)}


def tiny(seed: int = 0, **settings: Any) -> Any:
    """A causal language model of two blocks, with tied embeddings."""
    import transformers

    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual | settings))


def arguments(folder: str | Path, **flags: Any) -> Any:
    import transformers

    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 1,
        "use_cpu": device() == "cpu",
    }  # fmt: skip
    return transformers.TrainingArguments(**deepcopy({**settings, **flags}))  # a Trainer writes into them


def trainer(stage: int | None, folder: str | Path, flags: dict[str, Any] | None = None, **keywords: Any) -> Any:
    """A Trainer by DDP (`stage` None) or by Onefold, with TrainingArguments of these `flags`."""
    import transformers

    cls, zero = transformers.Trainer, {}
    if stage is not None:
        cls, zero = onefold.hf.Trainer, {"zero": onefold.Zero(stage=stage)}
    settings = {"train_dataset": Sentences(), "eval_dataset": Sentences(10), **zero, **keywords}
    return cls(model=settings.pop("model", None) or tiny(), args=arguments(folder, **(flags or {})), **settings)


def trained(one: Any, resume: str | bool | None = None) -> Run:
    """Trains, and collects what was logged."""
    one.train(resume_from_checkpoint=resume)
    logs = [row for row in one.state.log_history if "loss" in row]
    state = {name: value.clone() for name, value in one.accelerator.get_state_dict(one.model).items()}
    return Run([row["loss"] for row in logs], [row["grad_norm"] for row in logs], state)


def run(
    stage: int | None,
    folder: str | Path,
    flags: dict[str, Any] | None = None,
    resume: str | bool | None = None,
    build: Callable[[], Any] = tiny,
) -> Run:
    return trained(trainer(stage, folder, flags, model=build()), resume)


def runs(stages: tuple[int | None, ...], folder: str | Path, flags: dict[str, Any] | None = None) -> list[Run]:
    """Runs of several stages, one after the other."""
    return [run(stage, folder, flags) for stage in stages]
