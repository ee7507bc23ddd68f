"""transformers' Trainer, adapters of PEFT and Lightning's Trainer on two NCCL ranks: the same bits at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nccl.ranks import MARKS, run_nccl

pytestmark = MARKS
STAGES = (0, 1, 2, 3)


def trainers(folder: str, flags: dict[str, Any]) -> tuple[bool, list[list[float]]]:
    """Whether stages 0 to 3 logged and ended the same, and the losses of DDP and of stage 0."""
    from tests.hf.runs import runs, same

    plain, *others = runs((None, *STAGES), folder, flags)
    return same(others), [plain.losses, others[0].losses]


FLAGS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({"optim": "adamw_torch_fused", "weight_decay": 0.1}, 1e-5),
    "bf16, checkpointed": ({"bf16": True, "gradient_checkpointing": True}, 0.02),
    "fp16": ({"fp16": True}, 0.02),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_trainer_logs_the_same_at_every_stage_and_nearly_what_ddp_logs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags, near = FLAGS[name]
    for alike, (plain, ours) in run_nccl(2, trainers, str(tmp_path), flags, timeout_s=180):
        assert alike
        assert ours == pytest.approx(plain, abs=near)


def goes_on(folder: str) -> bool:
    from tests.hf.runs import run, same

    flags = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "bf16": True}
    whole = run(2, folder, flags)
    return same([whole, run(3, folder, flags, resume=f"{folder}/checkpoint-2")])


def test_a_trainer_goes_on_at_another_stage_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_nccl(2, goes_on, str(tmp_path), timeout_s=180) == [True, True]


def adapters_differ(precision: str) -> dict[int, list[str]]:
    from tests.peft.adapters import adapted, unlike_stage_0

    return unlike_stage_0(adapted, {"precision": precision})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_over_a_frozen_base_train_the_same_at_every_stage(precision: str) -> None:
    pytest.importorskip("peft")
    assert run_nccl(2, adapters_differ, precision, timeout_s=180) == [{}, {}]


def fits(settings: dict[str, Any]) -> list[int]:
    """Stages at which Lightning's Trainer did not train as at stage 0."""
    from tests.lightning.test_trainer import equal, runs

    found = runs(STAGES, max_epochs=1, **settings)
    return [stage for stage in STAGES if not equal(found[stage], found[0])]


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"}], ids=str)
def test_lightning_trains_the_same_at_every_stage(settings: dict[str, Any]) -> None:
    pytest.importorskip("lightning")
    assert run_nccl(2, fits, settings, timeout_s=180) == [[], []]
