"""A small bf16-friendly model on two ranks, trained for some steps: what the tests of users' habits start from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.models import Residual, Stack

WIDTH = 16
STAGES = (0, 1, 2, 3)


def net() -> Stack:
    torch.manual_seed(0)
    return Stack(
        first=nn.Linear(WIDTH, WIDTH),
        layers=nn.ModuleList(Residual(WIDTH) for _ in range(3)),
        head=nn.Linear(WIDTH, 4),
    )


def built(stage: int, precision: Any = "bf16", *, lr: float = 1e-3, **fields: Any) -> tuple[Any, onefold.Optimizer]:
    onefold.init()
    offered = {name: fields.pop(name) for name in ("step_in_backward", "groups") if name in fields}
    cls = fields.pop("cls", torch.optim.AdamW)
    model = onefold.shard(
        net(), stage=stage, precision=precision, bucket_bytes=2 << 10, **{"timeout_s": 20.0, **fields}
    )
    return model, onefold.Optimizer(model, cls, lr=lr, **offered)


def rows(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: nn.Module, optimizer: onefold.Optimizer, steps: range) -> None:
    for step in steps:
        model(rows(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(model: nn.Module) -> dict[str, Tensor]:
    """The fp32 parameters, on every rank."""
    return onefold.full_state_dict(model, every_rank=True)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].dtype is not b[name].dtype or not torch.equal(a[name], b[name])]
