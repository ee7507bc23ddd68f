"""Adapters in transformers' Trainer and in an Accelerate loop: as without Onefold, and no checkpoint has the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks

pytest.importorskip("peft")
pytest.importorskip("accelerate")

from peft import PeftModel

from tests.hf.runs import Run, Sentences, same, trained, trainer
from tests.peft.adapters import adapted, base

BASE_BYTES = 4 * sum(param.numel() for param in base().parameters())
WORSE = {
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1,
    "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2,
}  # fmt: skip


def best(stage: int | None, folder: str, flags: dict[str, Any]) -> tuple[Run, float, float, int]:
    """Trains adapters and a head, on one sentence alone, so that evaluations get worse. The run, which ends with the
    best model; its evaluation; that of the model that PEFT reads; and the bytes of the last checkpoint."""
    model = adapted(modules_to_save=["lm_head"])
    data = {"train_dataset": [Sentences()[0]] * 64, "eval_dataset": Sentences(8)}
    one = trainer(stage, folder, {**WORSE, **flags}, model=model, **data)
    run = trained(one)
    assert not str(one.state.best_model_checkpoint).endswith("-4")
    loss = one.evaluate()["eval_loss"]
    one.save_model(f"{folder}/final")
    dist.barrier()
    again = trainer(None, folder, model=PeftModel.from_pretrained(base(), f"{folder}/final"), eval_dataset=Sentences(8))
    held = sum(file.stat().st_size for file in Path(folder, "checkpoint-4").rglob("*") if file.is_file())
    return run, loss, again.evaluate()["eval_loss"], held


def of_stages(folder: str, flags: dict[str, Any]) -> list[tuple[Run, float, float, int]]:
    return [best(stage, f"{folder}/{stage}", flags) for stage in (None, 0, 3)]


@pytest.mark.parametrize("flags", [{}, {"save_only_model": True}], ids=["state", "model"])
def test_the_best_adapters_and_modules_to_save_come_back_and_no_checkpoint_has_the_base(flags, tmp_path: Path) -> None:
    (plain, *read), *others = run_ranks(2, of_stages, str(tmp_path), flags)[0]
    assert same([run for run, *_ in others])
    assert others[0][0].losses == pytest.approx(plain.losses, abs=1e-6)
    for _, loss, reread, held in others:
        assert (loss, reread) == pytest.approx(read[:2], abs=1e-6)
        assert held < BASE_BYTES


def prompts(folder: str) -> list[float]:
    """Trained prompts, which PEFT saves by running their module: evaluations before and after saving."""
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    one = trainer(3, folder, model=model)
    one.train()
    one.save_model(f"{folder}/final")
    dist.barrier()
    again = trainer(None, folder, model=PeftModel.from_pretrained(base(), f"{folder}/final"))
    return [found.evaluate()["eval_loss"] for found in (one, again)]


def test_prompts_are_saved_at_stage_3(tmp_path: Path) -> None:
    for ours, reread in run_ranks(2, prompts, str(tmp_path)):
        assert ours == pytest.approx(reread, abs=1e-6)
