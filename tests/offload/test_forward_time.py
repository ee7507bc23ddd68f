"""Offload(optimizer="auto") plans by the seconds of a forward: those of later steps, not those of a first use."""

from __future__ import annotations

import time

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
        self.next_s = first_s

    def __call__(self, x: Tensor) -> Tensor:
        time.sleep(self.next_s)
        self.next_s = BLOCK_S
        out = x.tanh()
        out.register_hook(lambda _: time.sleep(BACKWARD_S))
        return out


def forward_s(micro_batches: int) -> float:
    onefold.init()
    blocks = [Residual(16, activation=Slow(BLOCK_S if number else FIRST_S)) for number in range(BLOCKS)]
    inner = nn.Sequential(nn.Linear(16, 16, bias=False), *blocks)
    offload = onefold.Offload(optimizer="auto", device_bytes=1 << 20)
    model = onefold.shard(inner, units=(Residual, nn.Linear), stage=3, offload=offload)
    adam = onefold.Optimizer(model, torch.optim.AdamW)
    for _ in range(micro_batches):
        model(torch.randn(4, 16)).square().mean().backward()
    adam.step()
    return float(engine_of(model).watch.forward_s)


def test_neither_a_first_use_nor_backward_counts() -> None:
    for micro_batches in (1, 3):
        for found in run_ranks(2, forward_s, micro_batches):
            assert BLOCKS * BLOCK_S <= found < FIRST_S / 2, (micro_batches, found)
