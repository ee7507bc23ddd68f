"""A moving average of the masters: the bits of plain torch's, on every tier, in checkpoints, and in evaluation."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS, DECAY = 16, 2, 0.9
Training = tuple[nn.Module, onefold.Optimizer, onefold.EMA]


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(2, DIM), nn.Linear(DIM, 4))


def batch(step: int) -> Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def sharded(stage: int, precision: str, offload: Any = None) -> Training:
    model = onefold.shard(built(), stage=stage, precision=precision, offload=offload)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.01), onefold.EMA(model, DECAY)


def step(training: Training, number: int) -> None:
    model, optimizer, ema = training
    model(batch(number)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()


def averaged(stage: int, precision: str, tier: str | None, path: str) -> None:
    offload = onefold.Offload(optimizer=tier, path=path if tier == "disk" else None) if tier else None
    training = model, optimizer, ema = sharded(stage, precision, offload)
    plain = {name: value.clone() for name, value in onefold.full_state_dict(model).items()}
    for number in range(3):
        step(training, number)
        for name, value in onefold.full_state_dict(model).items():
            plain[name].lerp_(value, 1 - DECAY)
    found, masters = ema.full_state_dict(), onefold.full_state_dict(model)
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
    mine = dict(onefold.shards(model))
    for name, value in masters.items():  # on rank 0
        if name in mine:
            assert mine[name].dtype is torch.float32
            assert torch.equal(value.flatten()[: mine[name].numel()], mine[name])
    memory = onefold.memory(model)
    assert memory.optimizer.measured == memory.optimizer.planned
    assert all(row.measured == row.planned for row in memory.elsewhere if row.state == "optimizer")
    # evaluation: the averages compute, and everything is as before afterwards
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = batch(9).to(dtype)
    with torch.no_grad():
        before = model(x)
        with ema.applied():
            inside = model(x)
            with onefold.full_parameters(model):
                shown = {name: param.detach().clone() for name, param in model.named_parameters()}
                assert torch.equal(model(x), inside)
            load = partial(model.load_state_dict, {}, strict=False)
            for refused in (optimizer.step, lambda: onefold.full_state_dict(model), ema.applied().__enter__, load):
                with pytest.raises(onefold.StateError, match="leave it first"):
                    refused()
        assert torch.equal(model(x), before)
    if plain:
        twin = built().to(dtype)
        twin.load_state_dict({name: value.to(dtype) for name, value in plain.items()})
        assert all(torch.equal(shown[name], param) for name, param in twin.named_parameters())
        assert torch.equal(inside, twin(x))
    for name, value in onefold.full_state_dict(model).items():
        assert torch.equal(value, masters[name])
    with pytest.raises(ZeroDivisionError), ema.applied():
        raise ZeroDivisionError
    other = sharded(stage, precision, offload)
    for number in range(5):  # as if nobody had looked
        step(other, number)
    for number in range(3, 5):
        step(training, number)
    ours, theirs = onefold.full_state_dict(model), onefold.full_state_dict(other[0])
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


WAYS = [
    (0, "fp32", None), (0, "bf16", None), (1, "bf16", None), (2, "fp32", None), (3, "fp32", None), (3, "bf16", None),
    (2, "bf16", "host"), (3, "bf16", "host"), (3, "bf16", "disk"),
]  # fmt: skip


@pytest.mark.parametrize("stage, precision, tier", WAYS)
def test_an_ema_has_the_bits_of_plain_torch_and_evaluates_without_a_trace(
    stage: int, precision: str, tier: str | None, tmp_path: Path
) -> None:
    run_ranks(RANKS, averaged, stage, precision, tier, str(tmp_path))


def save_it(folder: str) -> dict[str, Tensor]:
    training = sharded(2, "bf16")
    step(training, 0)
    step(training, 1)
    onefold.save(folder, training[0], training[1])
    return training[2].full_state_dict()


def load_it(folder: str, wanted: dict[str, Tensor]) -> None:
    training = model, optimizer, ema = sharded(3, "bf16")
    step(training, 7)
    onefold.load(folder, model, optimizer)
    found = ema.full_state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    step(training, 2)
    plain = onefold.shard(built(), stage=1)
    onefold.load(folder, plain, onefold.Optimizer(plain, torch.optim.AdamW, lr=0.01))  # without an EMA


def test_an_ema_is_saved_and_loaded_at_any_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    wanted = run_ranks(RANKS, save_it, folder)[0]
    run_ranks(1, load_it, folder, wanted)
    run_ranks(3, load_it, folder, wanted)


def load_without(folder: str) -> None:
    torch.manual_seed(1)
    model = onefold.shard(built(), stage=2)
    onefold.save(folder, model, step=0)
    with torch.no_grad():
        model.head.bias.add_(1.0)
    ema = onefold.EMA(model, DECAY)
    onefold.load(folder, model)
    masters = onefold.full_state_dict(model)
    assert all(torch.equal(value, masters[name]) for name, value in ema.full_state_dict().items())
    for mistake in (dict(decay=1.5), dict(decay="0.9"), dict(decay=0.9, name="a b"), dict(decay=0.9)):
        with pytest.raises(onefold.ConfigError):
            onefold.EMA(model, **mistake)
    logging.getLogger("onefold").debug("kept until here: %s", ema)


def test_an_ema_that_the_checkpoint_does_not_have_begins_with_what_was_loaded(tmp_path: Path) -> None:
    run_ranks(RANKS, load_without, str(tmp_path / "run"))


def of_one_rank(stage: int, precision: str) -> None:
    """A unit so small that one rank has all of it, and the other none."""
    torch.manual_seed(5)
    model = onefold.shard(nn.Linear(4, 4, bias=False), stage=stage, precision=precision)
    optimizer, ema = onefold.Optimizer(model, torch.optim.SGD, lr=0.5), onefold.EMA(model, DECAY)
    plain = {name: value.clone() for name, value in onefold.full_state_dict(model).items()}
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.clip_grad_norm(1.0)
    assert list(onefold.grad_norms(model)) == ["weight"]
    for _, piece in optimizer.gradients():
        piece.clamp_(-0.1, 0.1)
    optimizer.step()
    ema.update()
    masters, averages = onefold.full_state_dict(model), ema.full_state_dict()
    assert averages.keys() == masters.keys() == plain.keys()
    assert all(torch.equal(averages[name], plain[name].lerp_(value, 1 - DECAY)) for name, value in masters.items())
    with torch.no_grad(), ema.applied():
        model(torch.ones(2, 4))
    assert sum(master.numel() for _, master in onefold.shards(model)) == (0 if torch.distributed.get_rank() else 16)


@pytest.mark.parametrize("stage, precision", [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_ranks_that_have_nothing_of_a_unit_take_part(stage: int, precision: str) -> None:
    run_ranks(RANKS, of_one_rank, stage, precision)


class Interrupted(TorchDispatchMode):
    """Raises once, at the n-th copy of values that torch makes."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return func(*args, **kwargs or {})


def interrupted(stage: int, precision: str) -> int:
    """Where a swap ends by an exception, at any of its copies, parameters are as before it, and training goes on."""
    training = model, _, ema = sharded(stage, precision)
    for number in range(2):
        step(training, number)
    with onefold.full_parameters(model):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
    masters, copies, ended = onefold.full_state_dict(model, every_rank=True), 0, True
    while ended:
        with ExitStack() as stack:
            try:
                with Interrupted(copies):
                    stack.enter_context(ema.applied())
                ended = False
            except KeyboardInterrupt:
                copies += 1
        with onefold.full_parameters(model):
            assert all(torch.equal(param, before[name]) for name, param in model.named_parameters()), copies
        now = onefold.full_state_dict(model, every_rank=True)
        assert all(torch.equal(value, masters[name]) for name, value in now.items()), copies
    step(training, 2)
    return copies


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_swap_that_is_interrupted_leaves_the_parameters_as_they_were(precision: str) -> None:
    for stage in range(4):
        assert min(run_ranks(RANKS, interrupted, stage, precision)) > 3
