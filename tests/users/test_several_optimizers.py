"""Several Optimizers over one model, each for parameters of its own, and a new one in place of an old one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS = 16, 2


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(3, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and the others: both kinds are in every unit."""
    params = list(model.parameters())
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]


def batch(step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def two(model: nn.Module) -> tuple[onefold.Optimizer, onefold.Optimizer]:
    matrices, others = split(model)
    return (
        onefold.Optimizer(model, torch.optim.AdamW, groups=[{"params": matrices}], lr=0.02),
        onefold.Optimizer(model, torch.optim.SGD, groups=[{"params": others}], lr=0.1, momentum=0.9),
    )


def clipped(params: list[nn.Parameter], most: float) -> Tensor:
    return nn.utils.clip_grad_norm_(params, most)


def train(stage: int, precision: str, offload: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two optimizers, both stepped; then the first alone; then the second alone after a second backward."""
    model = onefold.shard(built(), stage=stage, precision=precision, offload=offload)
    first, second = two(model)
    norms = []

    def backward(step: int) -> None:
        model(batch(step)).float().square().sum().backward()

    for step in range(3):
        backward(step)
        norms += [first.clip_grad_norm(0.5), second.clip_grad_norm(0.1)]
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    for step in range(3, 6):  # as a GAN is trained: one, then the other
        first.zero_grad()
        backward(step)
        first.step()
        second.zero_grad()
        backward(step + 10)
        second.step()
    assert (first.steps, second.steps) == (6, 6)
    return norms, onefold.full_state_dict(model)


def plain() -> tuple[list[Tensor], dict[str, Tensor]]:
    model = nn.parallel.DistributedDataParallel(built())
    matrices, others = split(model)
    first = torch.optim.AdamW(matrices, lr=0.02)
    second = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    norms = []

    def backward(step: int) -> None:
        model(batch(step)).square().sum().backward()

    for step in range(3):
        backward(step)
        norms += [clipped(matrices, 0.5), clipped(others, 0.1)]
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    for step in range(3, 6):
        first.zero_grad()
        backward(step)
        first.step()
        second.zero_grad()
        backward(step + 10)
        second.step()
    return norms, {name: value.clone() for name, value in model.module.state_dict().items()}


def equal_at_all_stages(precision: str) -> None:
    norms, wanted = train(0, precision)
    if precision == "fp32":
        theirs, values = plain()
        for ours, other in zip(norms, theirs, strict=True):
            assert torch.allclose(ours, other, rtol=1e-5)
        for name, value in wanted.items():
            assert torch.allclose(value, values[name], rtol=1e-4, atol=1e-6), name
    ways: list[tuple[int, Any]] = [(1, None), (2, None), (3, None), (2, "host"), (3, "host")]
    for stage, tier in ways:
        found, state = train(stage, precision, onefold.Offload(optimizer=tier) if tier else None)
        assert all(torch.equal(a, b) for a, b in zip(norms, found, strict=True)), (stage, tier)
        for name, value in state.items():
            assert torch.equal(value, wanted[name]), (stage, tier, name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_optimizers_train_as_ddp_does_and_to_the_same_bits_at_every_stage(precision: str) -> None:
    run_ranks(RANKS, equal_at_all_stages, precision)


def run_again(stage: int, in_backward: bool) -> None:
    """A notebook cell that makes the optimizer, run twice: the new one starts afresh, the old one is of no use."""
    model, twin = onefold.shard(built(), stage=stage), onefold.shard(built(), stage=stage)
    old = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02, step_in_backward=in_backward)
    other = onefold.Optimizer(twin, torch.optim.AdamW, lr=0.02)

    def step(model: nn.Module, optimizer: onefold.Optimizer, number: int) -> None:
        model(batch(number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, old, 0)
    step(twin, other, 0)
    kept = onefold.memory(model).optimizer
    assert kept.measured == kept.planned > 0
    new = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    assert onefold.memory(model).optimizer.measured == onefold.memory(model).optimizer.planned == 0
    for use in (old.step, old.zero_grad, lambda: old.clip_grad_norm(1.0)):
        with pytest.raises(onefold.StateError, match="later one"):
            use()
    del other
    gc.collect()
    fresh = onefold.Optimizer(twin, torch.optim.SGD, lr=0.1)
    for number in range(1, 3):
        step(model, new, number)
        step(twin, fresh, number)
    ours, theirs = onefold.full_state_dict(model), onefold.full_state_dict(twin)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_new_optimizer_replaces_the_old_one_and_frees_its_state(stage: int, in_backward: bool) -> None:
    run_ranks(RANKS, run_again, stage, in_backward)


def dropped_optimizer_is_freed() -> None:
    model = onefold.shard(built(), stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    with torch.no_grad():
        model(batch(0))
    assert onefold.memory(model).optimizer.measured == onefold.memory(model).optimizer.planned == 0


def test_the_state_of_an_optimizer_that_nobody_holds_is_freed() -> None:
    run_ranks(RANKS, dropped_optimizer_is_freed)


def refused_beside_another() -> None:
    model = onefold.shard(built(), stage=2)
    matrices, others = split(model)
    first = onefold.Optimizer(model, torch.optim.SGD, groups=[{"params": matrices}], lr=0.1)
    with pytest.raises(onefold.OptimizerError, match="step_in_backward=True needs one Optimizer"):
        onefold.Optimizer(model, torch.optim.SGD, groups=[{"params": others}], lr=0.1, step_in_backward=True)
    model(batch(0)).sum().backward()
    first.step()  # as before the attempt
    half = onefold.shard(built(), stage=2, precision="fp16")
    matrices, others = split(half)
    _first = onefold.Optimizer(half, torch.optim.SGD, groups=[{"params": matrices}], lr=0.1)
    with pytest.raises(onefold.OptimizerError, match="fp16 needs one Optimizer"):
        onefold.Optimizer(half, torch.optim.SGD, groups=[{"params": others}], lr=0.1)


def test_what_several_optimizers_cannot_share_is_refused_and_leaves_the_first_as_it_was() -> None:
    run_ranks(RANKS, refused_beside_another)


def saved_and_loaded(stage: int, folder: str) -> None:
    model = onefold.shard(built(), stage=stage, precision="bf16")
    first, second = two(model)

    def step(model: nn.Module, optimizers: tuple[onefold.Optimizer, ...], number: int) -> None:
        model(batch(number)).float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    step(model, (first, second), 0)
    with pytest.raises(onefold.ConfigError, match="the model has 2 Optimizers, and 1 were given"):
        onefold.save(folder, model, first)
    onefold.save(folder, model, (first, second), extra={"epoch": 1})
    step(model, (first, second), 1)
    other = onefold.shard(built(), stage=3 - stage, precision="bf16")
    pair = two(other)
    assert onefold.load(folder, other, pair) == {"epoch": 1}
    step(other, pair, 1)
    ours, theirs = onefold.full_state_dict(model), onefold.full_state_dict(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with pytest.raises(onefold.CheckpointError, match="AdamW, SGD, this optimizer is SGD, AdamW"):
        onefold.load(folder, other, pair[::-1])


@pytest.mark.parametrize("stage", [0, 2])
def test_two_optimizers_are_saved_and_loaded_together(stage: int, tmp_path: Path) -> None:
    run_ranks(RANKS, saved_and_loaded, stage, str(tmp_path / "run"))
