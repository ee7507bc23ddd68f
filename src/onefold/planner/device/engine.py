"""What the host takes: to launch one operator, and for one block of a sharded model, forward, backward and update."""

from __future__ import annotations

import torch
from torch import nn

from onefold.comm.mesh import simulated_axes
from onefold.optim.optimizer import Optimizer
from onefold.planner.device.block import Block
from onefold.planner.device.clock import Clock
from onefold.sharding import shard_over

HIDDEN, TOKENS = 64, 16  # so few that a device is never the slower one
MANY = 8  # ranks: enough that every message is there
LAUNCHES = 500  # fewer than a stream's queue takes


def host(clock: Clock) -> dict[str, float]:
    """Seconds: `launch` of one operator, `block` of one more block in a step of a model on one rank, and
    `sharded_block` of one whose states are sharded, and which is a unit of its own."""
    tiny = torch.zeros(1, device=clock.device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            tiny.add_(1)

    return {
        "launch": min(clock.host_s(launches) for _ in range(5)) / LAUNCHES,
        "block": _block_s(clock, 1),
        "sharded_block": _block_s(clock, MANY),
    }


def _block_s(clock: Clock, ranks: int) -> float:
    """Seconds of one more block in a step of one of so many ranks, whose messages cost nothing."""
    few, many = (2, 6) if clock.quick else (4, 20)
    steps = [_step_s(clock, layers, ranks) for layers in (few, many)]
    return max(0.0, steps[1] - steps[0]) / (many - few)


def _step_s(clock: Clock, layers: int, ranks: int) -> float:
    """Seconds of a step of so many blocks that hardly compute."""
    axes = simulated_axes(ranks, plays="nccl" if clock.cuda else "gloo", values=False)
    model = nn.Sequential(*(Block(HIDDEN, heads=1) for _ in range(layers))).to(clock.device)
    each = sum(param.numel() for param in model[0].parameters()) * (2 if clock.cuda else 4)
    precision = "bf16" if clock.cuda else "fp32"
    shard_over(axes, model, None, {"stage": 3, "precision": precision, "bucket_bytes": each})
    optimizer = Optimizer(model, torch.optim.AdamW, lr=1e-3)
    x = torch.randn(1, TOKENS, HIDDEN, device=clock.device)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # orders are learnt, kernels compiled
        step()
    return min(clock.host_s(step) for _ in range(3 if clock.quick else 15))
