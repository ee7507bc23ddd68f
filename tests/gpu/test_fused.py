"""The fused update on one GPU: the same bits with both masters, torch's numbers, no host waits, the speed of a copy.

Also runs as python -m tests.gpu.test_fused, which prints the bandwidths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import Precision
from onefold.optim.kernels.cuda import update
from onefold.optim.kernels.rule import next_step
from onefold.state.rounding import join, narrow, split

pytestmark = pytest.mark.gpu
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 1e-1}),
]


def update_slice(cls: Any, group: dict[str, Any], state: dict[str, Any], grad: torch.Tensor, *rest: Any) -> None:
    update(next_step(cls, group, state, grad.numel(), grad.device), grad, *rest)


def build(precision: Any, cls: Any, settings: dict[str, Any], **more: Any) -> tuple[nn.Module, onefold.Optimizer]:
    onefold.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 8)).cuda()
    model = onefold.shard(model, stage=2, precision=precision)
    return model, onefold.Optimizer(model, cls, **settings, **more)


def train(precision: Any, cls: Any, settings: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = build(precision, cls, settings)
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.backward(model(x).float().square().mean())
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model)


def test_plain_and_split_masters_agree_bit_for_bit() -> None:
    for cls, settings in CLASSES:
        plain = train(Precision(compute="bf16", master="fp32"), cls, settings, 50)
        parts = train(Precision(compute="bf16", master="split"), cls, settings, 50)
        assert all(torch.equal(plain[name], parts[name]) for name in plain), (cls, settings)


def test_the_kernel_computes_what_the_class_computes() -> None:
    for cls, settings in CLASSES:
        torch.manual_seed(1)
        wide = torch.randn(100_003, device="cuda")
        grads = [torch.randn_like(wide).bfloat16() for _ in range(5)]
        theirs = nn.Parameter(wide.clone())
        reference = cls([theirs], **settings)
        copy, rest = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=torch.int16)
        split(wide, copy, rest)
        state: dict[str, Any] = {}
        for grad in grads:
            theirs.grad = grad.float() * 0.5
            reference.step()
            half, good = torch.tensor(0.5, device="cuda"), torch.zeros((), device="cuda")
            update_slice(cls, reference.param_groups[0], state, grad, copy, rest, half, good)
        ours = torch.empty_like(wide)
        join(copy, rest, ours)
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-5, atol=2e-6)
        for key, value in reference.state[theirs].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                torch.testing.assert_close(state[key], value, rtol=2e-5, atol=2e-6)


def test_the_copy_of_a_nan_is_a_nan() -> None:
    wide = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 100, device="cuda")
    copy, rest = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=torch.int16)
    split(wide, copy, rest)
    group = {"lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
    one, good = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    update_slice(torch.optim.AdamW, group, {}, torch.zeros_like(copy), copy, rest, one, good)
    assert torch.isnan(copy[0]) and torch.isinf(copy[1]) and copy[3] == 1.0
    assert torch.equal(copy.view(torch.int16)[0].cpu(), torch.tensor(0x7FC0, dtype=torch.int16))


def test_a_copy_set_by_hand_counts_where_its_remainder_means_nothing() -> None:
    copy = torch.tensor([0.0, -0.0, float("inf"), 1.0], dtype=torch.bfloat16, device="cuda")
    rest = torch.tensor([-5, -5, 5, 5], dtype=torch.int16, device="cuda")
    group = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    one, good = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    update_slice(torch.optim.SGD, group, {}, torch.zeros_like(copy), copy, rest, one, good)
    assert copy.tolist() == [0.0, 0.0, float("inf"), 1.0] and rest.tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_to_which_its_fp32_master_does_not_round_replaces_it(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0 + 2**-14, -0.3, 0.0, 5.0, 1e-30], device="cuda").repeat(500)
    values = torch.cat([values, torch.randn(100_003, device="cuda")])
    copy, wanted = torch.empty_like(values, dtype=dtype), values.clone()
    narrow(values, copy)
    copy[3::12], wanted[3::12] = 7.0, 7.0
    group = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    rule, one = next_step(torch.optim.SGD, group, {}, copy.numel(), copy.device), torch.ones((), device="cuda")
    for edits, master in ((False, values), (True, wanted)):
        own, seen = values.clone(), copy.clone()
        update(rule, torch.zeros_like(copy), seen, own, one, edits=edits)
        assert torch.equal(own, master)


def test_a_write_through_data_is_where_the_next_step_starts() -> None:
    for master in ("fp32", "split"):
        model, optimizer = build(Precision(compute="bf16", master=master), torch.optim.AdamW, {"lr": 1e-3})
        for step in range(3):
            if step == 2:
                model[0].weight.data.fill_(0.5)
            model(torch.ones(4, 64, device="cuda")).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (model[0].weight.float() - 0.5).abs().max() < 0.01


UPDATES = {
    "onefold's kernel": ("bf16", torch.optim.AdamW, {}),
    "copies": ("fp32", torch.optim.AdamW, {}),
    "torch's fused kernel": ("fp32", torch.optim.AdamW, {"fused": True}),
    "torch's fused momentum": ("fp32", torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "a master, and copies": ("bf16", torch.optim.Adagrad, {}),
    "a split master, and copies": (Precision(compute="bf16", master="split"), torch.optim.RMSprop, {"momentum": 0.9}),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_bad_gradients_change_nothing_and_are_reported_one_step_later(kind: str) -> None:
    precision, cls, settings = UPDATES[kind]
    for policy in ("skip", "raise"):
        model, adam = build(precision, cls, {"lr": 1e-2, **settings}, on_nonfinite=policy)
        states, raised = [], None
        for step in range(4):
            x = torch.ones(4, 64).cuda() * (float("nan") if step == 1 else 1.0)
            model(x).float().square().mean().backward()
            adam.clip_grad_norm(1.0)
            try:
                adam.step()
            except onefold.PrecisionError as error:
                raised = step, str(error)
            adam.zero_grad()
            counts = [float(t) for t in adam.state_tensors() if t.ndim == 0]
            states.append((onefold.full_state_dict(model), [t.clone() for t in adam.state_tensors() if t.ndim], counts))
        for key, value in states[0][0].items():
            assert torch.equal(value, states[1][0][key]), "a bad step changed the master"
        assert all(torch.equal(a, b) for a, b in zip(states[0][1], states[1][1], strict=True))
        assert adam.skipped == 1
        if policy == "raise":
            assert raised is not None and raised[0] == 2 and "first in unit" in raised[1]
        else:
            assert raised is None and states[3][2] == [3.0] * len(states[3][2]), "a skipped step was counted"


@pytest.mark.parametrize("kind", UPDATES)
def test_who_asks_whether_a_step_was_taken_is_told_at_once(kind: str) -> None:
    precision, cls, settings = UPDATES[kind]
    model, optimizer = build(precision, cls, {"lr": 1e-2, **settings}, on_nonfinite="skip")
    scheduler = onefold.Scheduler(optimizer, torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    taken = []
    for step in range(4):
        model(torch.ones(4, 64).cuda() * (float("nan") if step in (0, 2) else 1.0)).float().square().mean().backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        taken.append(optimizer.stepped)
    assert taken == [False, True, False, True] and optimizer.skipped == 2
    assert scheduler.get_last_lr() == [0.25 * 1e-2]


def bandwidths(numel: int = 1 << 28) -> dict[str, float]:
    """Bytes per second of the update and of a plain copy beside it, medians of interleaved runs."""
    grad = torch.randn(numel, device="cuda").bfloat16()
    wide = torch.randn(numel, device="cuda")
    copy, rest = torch.empty_like(grad), torch.empty(numel, dtype=torch.int16, device="cuda")
    split(wide, copy, rest)
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    state: dict[str, Any] = {}
    one, good = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    target = torch.empty_like(wide)
    work = {
        "copy": (lambda: target.copy_(wide), 8 * numel),
        "split AdamW": (lambda: update_slice(torch.optim.AdamW, group, state, grad, copy, rest, one, good), 26 * numel),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(12):
        for name, (run, _bytes) in work.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / 1e3)
    return {name: work[name][1] / sorted(times[name][2:])[5] for name in work}


def test_the_update_moves_at_ninety_percent_of_a_copy() -> None:
    found = bandwidths()
    assert found["split AdamW"] >= 0.9 * found["copy"], found


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed:", name)
    for name, speed in bandwidths().items():
        print(f"{name}: {speed / 1e12:.2f} TB/s")
