"""Checkpoints of a model on a GPU: exact resume, pinned staging, and to the CPU and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint.protocol.background import WORKER

pytestmark = pytest.mark.gpu

POLICIES: dict[str, Any] = {
    "fp32": "fp32",
    "split": onefold.Precision(compute="bf16", master="split"),
    "bf16": onefold.Precision(compute="bf16", master="fp32"),
    "fp16": "fp16",
}
SETTINGS: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True}]


def build(precision: str, device: str, seed: int = 0, **settings: Any) -> tuple[nn.Module, onefold.Optimizer]:
    onefold.init()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 65), nn.Dropout(0.2), nn.Tanh(), nn.Linear(65, 7))
    model = onefold.shard(net.to(device), stage=3, precision=POLICIES[precision])
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, **settings)


def train(model: nn.Module, optimizer: onefold.Optimizer, steps: int) -> None:
    device = next(model.parameters()).device
    for step in range(steps):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.backward(model(x).float().square().mean())
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


def state(model: nn.Module, optimizer: onefold.Optimizer) -> list[torch.Tensor]:
    rows = optimizer.state_dict()["slices"]
    values = list(onefold.full_state_dict(model).values())
    return values + [value.cpu() for row in rows for value in row["state"].values()]


def counted_on(optimizer: onefold.Optimizer) -> set[str]:
    """Where step counts live: on the host, or on the device where the class wants them there."""
    return {row["state"]["step"].device.type for row in optimizer.state_dict()["slices"]}


def alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_on_a_gpu_resumes_bit_for_bit(precision: str, settings: dict[str, Any], wait: bool, tmp_path: Path):
    model, optimizer = build(precision, "cuda", **settings)
    train(model, optimizer, 3)
    onefold.save(tmp_path, model, optimizer, wait=wait)
    train(model, optimizer, 3)
    onefold.finish_saves()
    assert wait or WORKER.memory(1, pinned=True).is_pinned()
    fresh, fresh_its = build(precision, "cuda", **settings)  # before the load, which brings the random states back
    train(fresh, fresh_its, 1)
    resumed, its = build(precision, "cuda", seed=1, **settings)
    onefold.load(tmp_path, resumed, its)
    assert counted_on(its) == counted_on(fresh_its)
    train(resumed, its, 3)
    assert alike(state(model, optimizer), state(resumed, its))


@pytest.mark.parametrize(("there", "here"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_from_one_device_to_another(there: str, here: str, tmp_path: Path):
    model, optimizer = build("split", there)
    train(model, optimizer, 2)
    onefold.save(tmp_path, model, optimizer)
    other, its = build("fp32", here, seed=1)
    onefold.load(tmp_path, other, its)
    assert alike(state(model, optimizer), state(other, its))
    train(other, its, 1)
