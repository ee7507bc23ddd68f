"""One GPU: block inputs on the device and on the host train to the same bits, and are where they are said to be.

Also runs as python -m tests.gpu.test_activations_gpu.
"""

from __future__ import annotations

import gc

import pytest
import torch

import onefold
from onefold.cost.shapes import Shape
from onefold.runtime.engine import engine_of
from tests.models.trainer_gpt import initialised_gpt, next_tokens

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=8, hidden=256, heads=4, seq=512, vocab=512)
INPUT_BYTES = 16 * SHAPE.seq * SHAPE.hidden * 2


def trained(policy: str, stage: int = 2) -> tuple[list[float], onefold.MemoryReport, int]:
    onefold.init()
    gc.collect()  # earlier models
    model = onefold.shard(initialised_gpt(SHAPE).cuda(), stage=stage, precision="bf16", activations=policy)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    losses = []
    for step in range(6):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, SHAPE.vocab, (16, SHAPE.seq), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(*next_tokens(tokens))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine_of(model).checkpoints:
        assert engine_of(model).checkpoints.arena.in_use == 0
    return losses, onefold.memory(model), torch.cuda.max_memory_allocated()


def test_inputs_on_the_host_train_to_the_bits_of_inputs_on_the_device() -> None:
    kept, _, most = trained("keep")
    again, device, less = trained("checkpoint")
    away, host, least = trained("checkpoint+host")
    assert kept == again == away
    assert device.checkpoints.measured == host.checkpoints_host.measured == SHAPE.layers * INPUT_BYTES
    assert device.checkpoints_host.measured == host.checkpoints.measured == 0
    assert less < most
    assert less - least > (SHAPE.layers - 4) * INPUT_BYTES
    assert host.fragmented is not None and host.fragmented >= 0


def test_host_memory_is_pinned_and_of_the_exact_size() -> None:
    onefold.init()
    model = onefold.shard(initialised_gpt(SHAPE).cuda(), stage=2, activations="checkpoint+host")
    tokens = torch.zeros(3, SHAPE.seq, dtype=torch.long, device="cuda")
    model(*next_tokens(tokens)).backward()
    (slab,) = engine_of(model).checkpoints.arena.tensors()
    assert slab.is_pinned() and slab.nbytes == SHAPE.layers * 3 * SHAPE.seq * SHAPE.hidden * 4


if __name__ == "__main__":
    for test in (
        test_inputs_on_the_host_train_to_the_bits_of_inputs_on_the_device,
        test_host_memory_is_pinned_and_of_the_exact_size,
    ):
        test()
        print(f"{test.__name__}: passed")
