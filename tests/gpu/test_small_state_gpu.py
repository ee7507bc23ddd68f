"""Optimizer state in bf16 and 8 bits on one GPU: the kernel gives the bits of operations of torch, and of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.cost.layout import Span
from onefold.optim.kernels import cuda_small, small
from onefold.optim.kernels.codec import BLOCK
from onefold.optim.kernels.rule import next_step
from onefold.optim.kernels.small import SmallStep, moments_in
from onefold.state.random_rounding import keys_of
from onefold.state.rounding import join
from tests.unit.test_small_state import CLASSES, FORMS, Vectors, same_state

pytestmark = pytest.mark.gpu
SPLIT = onefold.Precision(compute="bf16", master="split")


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_the_kernel_and_operations_of_torch_give_the_same_bits(form: str) -> None:
    torch.manual_seed(0)
    numel, used = 400 * BLOCK, 399 * BLOCK + 13
    part = Span(0, used)

    def step_of(cls: Any, group: dict[str, Any], state: dict[str, Any]) -> SmallStep:
        rule = next_step(cls, group, state, numel, torch.device("cuda"), form)
        moments = tuple(moment.at(part) for moment in moments_in(cls, group, state))
        return SmallStep(rule, moments, keys_of(0, "weight", int(state["step"])), 3 * BLOCK)

    for cls, chosen in CLASSES:
        group = {key: v for key, v in cls([torch.zeros(1)], **chosen).param_groups[0].items() if key != "params"}
        for dtype, master, grads in FORMS:
            values = torch.randn(numel, device="cuda")
            reference, by_torch, bad = values.clone(), dict[str, Any](), torch.zeros((), device="cuda")
            copy, stored, state = Vectors.of(values, dtype, master)
            beside = None if copy is None else copy[:used]
            for step in range(4):
                bad.fill_(step == 2)  # a step that must change nothing
                grad = torch.randn(used, device="cuda") * torch.exp(3 * torch.randn(used, device="cuda"))
                grad, factor = grad.clamp(-6e4, 6e4).to(grads), torch.tensor(0.5, device="cuda")
                small.update(step_of(cls, group, by_torch), grad, reference[:used], factor, bad)
                cuda_small.update(step_of(cls, group, state), grad, beside, stored[:used], factor, bad)
                assert same_state(by_torch, state), (cls, dtype, master, step)
                now = stored
                if copy is not None and master == "split":
                    now = torch.empty_like(values)
                    join(copy, stored, now)
                assert torch.equal(now, reference), (cls, dtype, master, step)


def train(state: Any, **fields: Any) -> dict[str, Tensor]:
    onefold.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 8)).cuda()
    onefold.shard(model, stage=2, precision=SPLIT, **fields)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, state=state)
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).float().square().mean().backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_the_host_updates_to_the_same_bits_as_the_device(state: str) -> None:
    here, there = train(state), train(state, offload="host")
    assert all(torch.equal(here[name], there[name]) for name in here)
