"""Train a case at stage 0 and at stage 3 on the same rank; what differs is a bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness import device, run_ranks
from tests.models import DIM
from tests.parity.training import batch_for, same_bits

Turn = Callable[[nn.Module, int], Tensor]


def batch(step: int, *shape: int, micro: int = 0) -> Tensor:
    """This rank's input of a step."""
    return torch.randn(*(shape or (3, DIM)), generator=batch_for(step, micro, dist.get_rank())).to(device())


def learn(model: nn.Module, step: int) -> Tensor:
    """The plain turn: forward, square, backward."""
    loss = model(batch(step)).square().mean()
    loss.backward()
    return loss


@dataclass(frozen=True)
class Case:
    """How to build a model, and what one turn (all forwards and backwards of a step) does with it."""

    build: Callable[[], nn.Module]
    turn: Turn = learn
    fields: Mapping[str, Any] = field(default_factory=dict)  # of shard()
    steps: int = 3  # the first is recorded, the second follows the record


class Trained(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(case: Case, stage: int, **fields: Any) -> Trained:
    torch.manual_seed(1234)
    settings = {"bucket_bytes": 1 << 12, "timeout_s": 8.0, **case.fields, **fields}
    model = onefold.shard(case.build().to(device()), stage=stage, **settings)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(case.steps):
        torch.manual_seed(step)  # dropout
        losses.append(case.turn(model, step).detach().clone())
        norms.append(optimizer.clip_grad_norm(1.0))
        optimizer.step()
        optimizer.zero_grad()
    with onefold.full_parameters(model):
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, norms, params, {name: b.clone() for name, b in model.named_buffers()})


def differences(case: Case, stage: int = 3, only: Mapping[str, Any] | None = None, **fields: Any) -> list[str]:
    """On a rank: what a stage did not do as stage 0 did; the fields `only` are that stage's."""
    return between(train(case, 0, **fields), train(case, stage, **fields, **(only or {})))


def between(whole: Trained, spread: Trained) -> list[str]:
    """On a rank: what the second run did not do as the first, which is one of stage 0."""
    found = []
    for what in ("losses", "norms"):
        pairs = zip(getattr(whole, what), getattr(spread, what), strict=True)
        found += [f"{what} of step {step}: {b} instead of {a}" for step, (a, b) in enumerate(pairs) if not equal(a, b)]
    for what in ("params", "buffers"):
        ours, theirs = getattr(spread, what), getattr(whole, what)
        assert ours.keys() == theirs.keys()
        changed = [name for name in ours if not equal(ours[name], theirs[name])]
        found += [f"{name} (by {far(ours[name], theirs[name])})" for name in changed]
    assert all(torch.isfinite(loss).all() for loss in whole.losses), "the case itself is broken"
    return found


def equal(a: Tensor, b: Tensor) -> bool:
    return same_bits(a.contiguous(), b.contiguous())


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def assert_equal(ranks: int, differences_of: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    found = run_ranks(ranks, differences_of, *args, **kwargs)
    assert not any(found), "\n".join(f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines)
