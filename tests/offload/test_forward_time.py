"""Offload(optimizer="auto") plans by the seconds of a forward: those of later steps, not those of a first use."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import Residual

BLOCKS, BLOCK_S, FIRST_S, BACKWARD_S = 8, 0.01, 0.5, 0.1


class Slow:
    """An activation that takes so long; its first use, and every backward, take longer."""

    def __init__(self, first_s: float) -> None:
        self.next_s, self.fails = first_s, False

    def __call__(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a batch that this block cannot have")
        time.sleep(self.next_s)
        self.next_s = BLOCK_S
        out = x.tanh()
        if out.requires_grad:
            out.register_hook(lambda _: time.sleep(BACKWARD_S))
        return out


def built(stage: int) -> tuple[Any, onefold.Optimizer, list[Slow]]:
    onefold.init()
    slow = [Slow(BLOCK_S if number else FIRST_S) for number in range(BLOCKS)]
    blocks = [Residual(16, activation=one) for one in slow]
    inner = nn.Sequential(nn.Linear(16, 16, bias=False), *blocks)
    offload = onefold.Offload(optimizer="auto", device_bytes=1 << 20)
    model = onefold.shard(inner, units=(Residual, nn.Linear), stage=stage, offload=offload)
    return model, onefold.Optimizer(model, torch.optim.AdamW), slow


def forward_s(stage: int, micro_batches: int) -> tuple[float, int]:
    model, adam, _ = built(stage)
    for _ in range(micro_batches):
        model(torch.randn(4, 16)).square().mean().backward()
    adam.step()
    return engine_of(model).watch.forward_s, engine_of(model).watch.forwards


@pytest.mark.parametrize(("stage", "micro_batches"), [(3, 1), (3, 3), (2, 3), (1, 3)])
def test_neither_a_first_use_nor_backward_counts(stage: int, micro_batches: int) -> None:
    """Where units are not unsharded, no part of a forward is known, and the shortest one counts."""
    for found, forwards in run_ranks(2, forward_s, stage, micro_batches):
        assert BLOCKS * BLOCK_S <= found < FIRST_S / 2, found
        assert forwards == micro_batches


def after_trouble() -> tuple[float, int]:
    """The first forward fails in a block, and evaluation comes between the one after it and step()."""
    model, adam, slow = built(3)
    slow[3].fails = True
    with pytest.raises(ValueError, match="cannot have"):
        model(torch.randn(4, 16))
    slow[3].fails = False
    loss = model(torch.randn(4, 16)).square().mean()
    time.sleep(FIRST_S)
    with torch.no_grad():
        model(torch.randn(4, 16))
    loss.backward()
    adam.step()
    return engine_of(model).watch.forward_s, engine_of(model).watch.forwards


def test_only_forwards_that_train_and_end_count() -> None:
    ((found, forwards),) = run_ranks(1, after_trouble)
    assert BLOCKS * BLOCK_S <= found < FIRST_S / 2 and forwards == 1, (found, forwards)
