"""transformers' Trainer on two ranks: DDP and stages 0 to 3 log the same losses and norms, and end with one model."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from tests.hf.runs import STAGES, Run, runs, same

FLAGS = {
    "as it is": {},
    "cosine schedule, no clipping, losses of each device's tokens": {
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.0, "average_tokens_across_devices": False,
    },
    "fused AdamW, weight decay, checkpointed": {
        "optim": "adamw_torch_fused", "weight_decay": 0.1, "gradient_checkpointing": True,
    },
    "SGD, clipped hard": {"optim": "sgd", "max_grad_norm": 0.1},
    "accumulated, each reduced": {
        "gradient_accumulation_steps": 3,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
}  # fmt: skip


def close(one: Run, plain: Run) -> bool:
    """True if a run logged what DDP logged, to 1e-6, and ended with its parameters."""
    return (
        one.losses == pytest.approx(plain.losses, abs=1e-6)
        and one.norms == pytest.approx(plain.norms, abs=1e-5)
        and all(torch.allclose(one.state[name], value, atol=1e-5) for name, value in plain.state.items())
    )


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_stages_equal_each_other_bitwise_and_ddp_to_1e6(flags, tmp_path):
    plain, *others = run_ranks(2, runs, (None, *STAGES), str(tmp_path), flags)[0]
    assert len(plain.losses) == 4
    assert same(others)
    assert all(close(one, plain) for one in others)


def test_accumulated_gradients_equal_ddp_and_stages_that_reduce_alike_are_bitwise_equal(tmp_path):
    flags = {"gradient_accumulation_steps": 3}
    plain, *others = run_ranks(2, runs, (None, *STAGES), str(tmp_path), flags)[0]
    assert same(others[:2])
    assert same(others[2:])
    assert all(close(one, plain) for one in others)


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_in_16_bits_stages_are_bitwise_equal_and_near_autocast(flag, tmp_path):
    plain, *others = run_ranks(2, runs, (None, *STAGES), str(tmp_path), {flag: True})[0]
    assert same(others)
    assert all(value.dtype is torch.float32 for value in others[0].state.values())
    assert others[0].losses == pytest.approx(plain.losses, abs=0.02)
