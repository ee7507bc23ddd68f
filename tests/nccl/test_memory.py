"""A model that is gone, and a forward that ran out of memory, leave nothing of ours on the device."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import device
from tests.models import GPT, GPT_VOCAB
from tests.nccl.ranks import MARKS, ON_CPU, RANKS, run_nccl

pytestmark = MARKS
STAGES = (0, 1, 2, 3)
TOO_MUCH_BYTES = 1 << 50


def allocated_bytes() -> int:
    """What live tensors of this process take on its device."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return 0  # a CPU has no such count


def train(model: nn.Module, optimizer: onefold.Optimizer, steps: int) -> None:
    for step in range(steps):
        dice = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, GPT_VOCAB, (2, 7), generator=dice).to(device())
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def made(stage: int, precision: str) -> tuple[nn.Module, onefold.Optimizer]:
    torch.manual_seed(0)
    model = onefold.shard(GPT().to(device()), stage=stage, precision=precision, bucket_bytes=8 << 10)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)


def out_of_memory(*_: object) -> None:
    if device() == "cuda":
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("as on a device whose memory is full")


def fail_in_forward(model: nn.Module) -> bool:
    handle = model.layers[1].register_forward_pre_hook(out_of_memory)
    try:
        model(torch.zeros(2, 6, dtype=torch.long, device=device()))
    except torch.OutOfMemoryError:
        return True
    finally:
        handle.remove()
    return False


def left_behind(stage: int, precision: str) -> tuple[bool, int]:
    """On a rank: whether the failure came, and bytes on the device that were not there before the model."""
    warm = made(stage, precision)  # workspaces of torch's libraries, which stay for good
    train(*warm, steps=1)
    del warm
    before = allocated_bytes()
    model, optimizer = made(stage, precision)
    train(model, optimizer, steps=2)
    failed = fail_in_forward(model)
    train(model, optimizer, steps=1)  # and the model is still of use
    failed = fail_in_forward(model) and failed
    del model, optimizer
    return failed, allocated_bytes() - before


def all_left_behind() -> dict[tuple[int, str], tuple[bool, int]]:
    return {(stage, one): left_behind(stage, one) for stage in STAGES for one in ("fp32", "bf16")}


@pytest.mark.parametrize("ranks", RANKS)
def test_models_leave_nothing_on_the_device_also_after_running_out_of_memory(ranks: int) -> None:
    for rank in run_nccl(ranks, all_left_behind, timeout_s=120):
        assert all(failed for failed, _ in rank.values())
        assert {case: left for case, (_, left) in rank.items() if left > 0} == {}


def bytes_during_training(stage: int) -> tuple[int, int]:
    """On a rank: bytes on the device behind the second step and behind the sixth, in which a forward failed."""
    model, optimizer = made(stage, "bf16")
    train(model, optimizer, steps=2)
    before = allocated_bytes()
    for _ in range(2):
        fail_in_forward(model)
        train(model, optimizer, steps=2)
    return before, allocated_bytes()


@pytest.mark.skipif(ON_CPU, reason="a CPU has no count of what is allocated")
@pytest.mark.parametrize("stage", STAGES)
def test_memory_does_not_grow_when_forwards_fail_between_steps(stage: int) -> None:
    for before, after in run_nccl(2, bytes_during_training, stage):
        assert after <= before
