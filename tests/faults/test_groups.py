"""Param groups: every way to write them that torch takes, and a named error on every rank for what cannot be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import run_ranks, run_ranks_raises


def two_layers(stage: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), stage=stage, bucket_bytes=256)


def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bool]:
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


def train_with_generators(late: bool) -> list[bool]:
    model = two_layers()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, groups=groups[:1] if late else groups)
    if late:
        optimizer.add_param_group(groups[1])
    return moved(model, optimizer)


@pytest.mark.parametrize("late", [False, True])
def test_generators_of_parameters_are_groups_too(late: bool) -> None:
    assert run_ranks(2, train_with_generators, late) == [[True] * 4] * 2


def reorder_groups() -> None:
    model = two_layers()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.5, groups=groups)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.param_groups.reverse()
    optimizer.step()


def group_without_params_on_one_rank() -> None:
    model = two_layers()
    good = [{"params": list(model.parameters())}]
    onefold.Optimizer(model, torch.optim.SGD, lr=0.1, groups=good if dist.get_rank() else [{"lr": 1}])


def another_lr_on_each_rank() -> None:
    onefold.Optimizer(two_layers(), torch.optim.SGD, lr=0.1 * (1 + dist.get_rank()))


def another_lr_on_each_rank_later() -> None:
    model = two_layers()
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, groups=[{"params": model[0].parameters()}])
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1 * (1 + dist.get_rank())})


class Counting(torch.optim.Optimizer):
    """Keeps its step count in the param group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def counting_optimizer() -> None:
    onefold.Optimizer(two_layers(), Counting, lr=0.1)


@pytest.mark.parametrize(
    ("act", "errors", "says"),
    [
        (reorder_groups, {"OptimizerError"}, "reordered"),
        (group_without_params_on_one_rank, {"OptimizerError", "MismatchError"}, "param groups"),
        (another_lr_on_each_rank, {"MismatchError"}, "lr"),
        (another_lr_on_each_rank_later, {"MismatchError"}, "lr"),
        (counting_optimizer, {"OptimizerError"}, "keeps state in its param group (k)"),
    ],
)
def test_a_mistake_in_groups_is_named_on_every_rank(act: Any, errors: set[str], says: str) -> None:
    for caught in run_ranks_raises(2, act):
        assert caught.type_name in errors and says in caught.message, caught
        assert caught.seconds < 10


class ListState(torch.optim.Optimizer):
    """Momentum kept in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffers = self.state[p].setdefault("buffers", [torch.zeros_like(p)])
                    buffers[0].mul_(0.9).add_(p.grad)
                    p.add_(buffers[0], alpha=-group["lr"])


def train_list_state() -> tuple[list[torch.Tensor], int]:
    onefold.init()
    torch.manual_seed(0)
    model = onefold.shard(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), stage=2)
    plain = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    plain.load_state_dict(model.state_dict())
    pairs = [(model, onefold.Optimizer(model, ListState, lr=0.1)), (plain, ListState(plain.parameters(), lr=0.1))]
    for step in range(3):
        for net, optimizer in pairs:
            x = net[0](torch.ones(2, 8))
            (net[1](x) if step != 1 else x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    differences = [a - b for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    return differences, onefold.memory(model).optimizer.measured


def test_state_in_lists_is_cut_with_its_slice_and_counted() -> None:
    differences, held = run_ranks(1, train_list_state)[0]
    assert all(float(d.abs().max()) < 1e-6 for d in differences)
    assert held == 4 * (64 + 64) * 2


def shard_with_shared_memory(as_buffer: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if as_buffer:
        model.register_buffer("row", model[0].weight.data[0])
    else:
        model[1].weight = nn.Parameter(model[0].weight.data)
    onefold.shard(model, stage=2)


@pytest.mark.parametrize("as_buffer", [False, True])
def test_memory_shared_without_being_one_parameter_is_refused(as_buffer: bool) -> None:
    for caught in run_ranks_raises(2, shard_with_shared_memory, as_buffer):
        assert caught.type_name == "ModelError" and "0.weight" in caught.message
