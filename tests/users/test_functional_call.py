"""torch.func.functional_call on a sharded model: the tensors given to it train, and the model is as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM = 16


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(2, DIM), nn.Linear(DIM, 4))


def batch(step: int) -> Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def fast_weights(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    return {n: (p.detach() * 1.5).requires_grad_() for n, p in model.named_parameters() if n in names}


def step(model: nn.Module, optimizer: onefold.Optimizer, number: int, *, twice: bool) -> None:
    model(batch(number)).square().sum().backward()
    if twice:  # between backward and step: nothing of it may reach the model
        given = fast_weights(model, [name for name, _ in model.named_parameters()])
        functional_call(model, given, (batch(5),)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def called(stage: int) -> None:
    plain = built()
    model, twin = onefold.shard(copy.deepcopy(plain), stage=stage), onefold.shard(copy.deepcopy(plain), stage=stage)
    names = [name for name, _ in plain.named_parameters()]
    for some in (names, names[:3]):
        theirs, ours = fast_weights(plain, some), fast_weights(model, some)
        wanted = functional_call(plain, theirs, (batch(0),))
        found = functional_call(model, ours, (batch(0),))
        assert torch.equal(found, wanted)
        wanted.square().sum().backward()
        found.square().sum().backward()
        assert all(torch.equal(ours[name].grad, theirs[name].grad) for name in some)
        model.zero_grad()
    optimizer, other = (onefold.Optimizer(one, torch.optim.AdamW, lr=0.01) for one in (model, twin))
    for number in range(3):
        step(model, optimizer, number, twice=True)
        step(twin, other, number, twice=False)
        sent = [dict(onefold.traffic(one).by_purpose) for one in (model, twin)]
        assert number == 0 or sent[0] == sent[1], sent  # the first step of each learns the order of units
    a, b = onefold.full_state_dict(model), onefold.full_state_dict(twin)
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    model.head.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(onefold.StateError, match=r"head\.bias was added, replaced or removed"):
        model(batch(0))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_functional_call_gives_gradients_to_its_tensors_and_leaves_the_model_alone(stage: int) -> None:
    run_ranks(2, called, stage)


def at_stage_3() -> None:
    model = onefold.shard(built(), stage=3)
    with onefold.full_parameters(model):
        given = fast_weights(model, [name for name, _ in model.named_parameters()])
    with pytest.raises(onefold.StateError, match="at stages 0 to 2"):
        functional_call(model, given, (batch(0),))
    model(batch(0)).sum().backward()


def test_functional_call_with_gradients_at_stage_3_is_refused_with_the_reason() -> None:
    run_ranks(2, at_stage_3)
