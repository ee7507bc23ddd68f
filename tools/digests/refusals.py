"""Mistakes that Onefold refuses with an error of its own. Each is a function that makes one, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onefold


def _sharded(**fields: Any) -> nn.Module:
    return onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), **fields)


def _trained(*, stage: int = 2, precision: str = "fp32", **kwargs: Any) -> tuple[nn.Module, onefold.Optimizer]:
    model = _sharded(stage=stage, precision=precision)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, **kwargs)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 8)).float().square().mean()


def _clip_after_step_in_backward() -> None:
    model, optimizer = _trained(step_in_backward=True)
    _loss(model).backward()
    optimizer.clip_grad_norm(1.0)


def _accumulate_with_step_in_backward() -> None:
    model, _ = _trained(step_in_backward=True)
    with onefold.accumulate(model):
        _loss(model).backward()


def _plain_backward_in_fp16() -> None:
    model, optimizer = _trained(precision="fp16")
    _loss(model).backward()
    optimizer.step()


def _two_optimizers() -> None:
    model, _ = _trained()
    onefold.Optimizer(model, torch.optim.AdamW)


def _sharded_gradient_read() -> None:
    model, _ = _trained()
    _loss(model).backward()
    model[0].weight.grad.sum()


MISTAKES: dict[str, Callable[[], object]] = {
    "stage-7": lambda: _sharded(stage=7),
    "offload-at-stage-0": lambda: _sharded(stage=0, offload="host"),
    "offload-parameters-at-stage-2": lambda: _sharded(
        stage=2, offload=onefold.Offload(optimizer="host", parameters="host")
    ),
    "disk-without-path": lambda: onefold.Offload(optimizer="disk"),
    "split-master-in-fp16": lambda: _sharded(stage=2, precision=onefold.Precision(compute="fp16", master="split")),
    "whole-tensor-optimizer": lambda: onefold.Optimizer(_sharded(stage=2), torch.optim.LBFGS),
    "step-in-backward-in-fp16": lambda: _trained(precision="fp16", step_in_backward=True),
    "clip-after-step-in-backward": _clip_after_step_in_backward,
    "accumulate-with-step-in-backward": _accumulate_with_step_in_backward,
    "plain-backward-in-fp16": _plain_backward_in_fp16,
    "step-without-gradients": lambda: _trained()[1].step(),
    "sharded-twice": lambda: onefold.shard(_sharded(stage=2), stage=2),
    "two-optimizers": _two_optimizers,
    "state-dict-at-stage-3": lambda: _sharded(stage=3).state_dict(),
    "sharded-gradient-read": _sharded_gradient_read,
    "mesh-too-large": lambda: onefold.mesh(shard=64),
}
