"""A released parameter reads as NaN, a write to it is found and named, and neither ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.harness import fresh_ranks
from tests.models import DIM, Stack, blocks
from tests.parity.stage3.compare import batch


def started() -> tuple[nn.Module, Any]:
    model = onefold.shard(Stack(blocks(2), nn.Linear(DIM, 3)), stage=3, bucket_bytes=1 << 20, timeout_s=10.0)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def train(model: nn.Module, adam: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    adam.step()
    adam.zero_grad()


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum().item(),
    "item": lambda p: p[0, 0].item(),
    "clone": lambda p: p.detach().clone()[1, 1].item(),
    "matmul": lambda p: (torch.ones(1, p.shape[0]) @ p).sum().item(),
    "transposed": lambda p: p.t().contiguous()[0, 0].item(),
    "numpy": lambda p: float(p.detach().numpy()[2, 2]),
    "tolist": lambda p: p.tolist()[0][0],
    "data": lambda p: p.data.mean().item(),
}


def read() -> list[str]:
    """What did not read as NaN: before training, behind steps, behind an evaluation."""
    model, adam = started()
    wrong = []
    for step in range(3):
        weight = model.layers[1].up.weight
        assert weight.shape == (2 * DIM, DIM) and weight.dtype == torch.float32
        assert weight.requires_grad and weight.is_leaf
        found = {name: use(weight) for name, use in READS.items()}
        wrong += [f"step {step}: {name} gave {value}" for name, value in found.items() if value == value]
        repr(model), repr(weight)
        train(model, adam, step)
        with torch.no_grad():
            model(batch(step))
    assert torch.isfinite(model(batch(9))).all()
    return wrong


def test_a_released_parameter_reads_as_nan_and_keeps_its_shape() -> None:
    for outcome in fresh_ranks(2, read):
        assert (outcome.exitcode, outcome.value) == (0, []), outcome.error


def _set_data(p: nn.Parameter) -> None:
    p.data[0] = 1


def _set_row(p: nn.Parameter) -> None:
    p[0] = 1.0


def _set_one(p: nn.Parameter) -> None:
    p.data[0, 0] = 1


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "fill_": lambda p: p.fill_(1.0),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "add_": lambda p: p.add_(1.0),
    "mul_": lambda p: p.mul_(2.0),
    "data.fill_": lambda p: p.data.fill_(1.0),
    "data.zero_": lambda p: p.data.zero_(),
    "data.copy_": lambda p: p.data.copy_(torch.ones(p.shape)),
    "data.add_": lambda p: p.data.add_(torch.ones(p.shape)),
    "data[0] = 1": _set_data,
    "data[0, 0] = 1": _set_one,
    "p[0] = 1": _set_row,
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.ones_": lambda p: nn.init.ones_(p),
    "detach().fill_": lambda p: p.detach().fill_(1.0),
    "uniform_": lambda p: p.uniform_(),
    "data = other": lambda p: setattr(p, "data", torch.ones(p.shape)),
}


def write(names: list[str]) -> list[str]:
    """What neither raised at once nor at the next forward, by name; then the model must work again."""
    model, adam = started()
    train(model, adam, 0)
    wrong = []
    for name in names:
        weight = model.layers[1].up.weight
        try:
            with torch.no_grad():
                WRITES[name](weight)
        except RuntimeError:
            continue  # now: torch refuses to write to many elements in one place
        try:
            model(batch(1))
            wrong.append(f"{name}: nothing was raised")
        except onefold.StateError as error:
            if "layers.1.up.weight" not in str(error):
                wrong.append(f"{name}: {error}")
    return wrong


ASSIGNED = ["data = other"]  # stays wrong until it is undone, so last and alone


@pytest.mark.parametrize("names", [[n for n in WRITES if n not in ASSIGNED], ASSIGNED], ids=["in place", "assigned"])
def test_a_write_to_a_released_parameter_raises_now_or_at_the_next_gather(names: list[str]) -> None:
    for outcome in fresh_ranks(2, write, names):
        assert (outcome.exitcode, outcome.value) == (0, []), outcome.error


def write_then_train() -> bool:
    """The write is lost and has been reported; what was trained is still there."""
    model, adam = started()
    train(model, adam, 0)
    with onefold.full_parameters(model):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.head.weight.zero_()
    try:
        model(batch(1))
        return False
    except onefold.StateError:
        pass
    with onefold.full_parameters(model):
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    train(model, adam, 1)
    return same


def test_training_goes_on_after_a_lost_write_was_reported() -> None:
    for outcome in fresh_ranks(2, write_then_train):
        assert (outcome.exitcode, outcome.value) == (0, True), outcome.error


def write_whole() -> tuple[float, float, bool]:
    """Inside full_parameters(write=True) a write is kept; without write=True it is refused, and lost."""
    model, adam = started()
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.head.weight.fill_(0.25)
        model.layers[0].norm.weight.data[0] = 7.0
    train(model, adam, 0)
    with onefold.full_parameters(model):
        kept = model.layers[0].norm.weight[0].item()
    try:
        with onefold.full_parameters(model), torch.no_grad():
            model.head.weight.fill_(9.0)
        raise AssertionError("a write without write=True was taken for good")
    except onefold.StateError as error:
        assert "head.weight" in str(error) and "write=True" in str(error)
    with onefold.full_parameters(model):
        return kept, model.head.weight.max().item(), bool(torch.isfinite(model(batch(1))).all())


def test_values_are_written_inside_full_parameters() -> None:
    for outcome in fresh_ranks(2, write_whole):
        assert outcome.exitcode == 0, outcome.error
        kept, largest, finite = outcome.value
        assert abs(kept - 7.0) < 0.1 and largest < 1.0 and finite
