"""transformers' Trainer on one GPU: the host does not wait for the device, and a step that cannot fit is told of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers")

import transformers

import onefold
import onefold.hf
from tests.hf.runs import VOCABULARY, Sentences, tiny
from tests.models.outputs import WithoutAttention

pytestmark = pytest.mark.gpu
LENGTH = 32768
BYTES_PER_TOKEN = 4096  # of activations; less than what the model of these tests keeps


class LongRows(Dataset):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + LENGTH) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def test_a_step_that_cannot_fit_is_warned_of_before_it_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    onefold.init()
    rows = torch.cuda.get_device_properties(0).total_memory // (BYTES_PER_TOKEN * LENGTH)
    flags = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=rows, max_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = onefold.hf.Trainer(model=tiny(), args=flags, train_dataset=LongRows(rows), zero=onefold.Zero(stage=2))
    with caplog.at_level(logging.WARNING, logger="onefold"), pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if "will not fit" in record.getMessage()]
    assert said.startswith("stage 2 will not fit: it needs ") and "; stage 3 with checkpointing needs " in said


class Watched(transformers.TrainerCallback):
    """From the third step to the last, whatever makes the host wait for the device is an error."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_host_waits_for_the_device_in_no_step(stage: int, tmp_path: Path) -> None:
    onefold.init()
    flags = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=5, bf16=True, max_grad_norm=1.0, weight_decay=0.1,
        optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = onefold.hf.Trainer(
        model=WithoutAttention(VOCABULARY), args=flags, train_dataset=Sentences(), callbacks=[Watched()],
        zero=onefold.Zero(stage=stage),
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
