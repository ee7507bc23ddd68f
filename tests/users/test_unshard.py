"""onefold.unshard() makes a sharded model plain again, as if it had never been sharded, and it can be sharded again."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS = 16, 2
HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")]


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(3, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM))


def batch(step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(batch(step)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def added(model: nn.Module) -> list[tuple[str, str, int]]:
    """Attributes of modules and hooks of modules and parameters, as a list to compare."""
    found = []
    for name, module in model.named_modules():
        found += [(name, attribute, 0) for attribute in vars(module)]
        found += [(name, hooks, len(vars(module)[hooks])) for hooks in HOOKS]
        found += [(name, type(module._parameters).__name__, 0)]
    for name, param in model.named_parameters():
        found.append((name, type(param).__name__, len(param._post_accumulate_grad_hooks or ())))
    return found


def alive(kind: str) -> int:
    gc.collect()
    return sum(type(one).__name__ == kind and type(one).__module__.startswith("onefold") for one in gc.get_objects())


def there_and_back(stage: int, precision: str, fields: dict[str, Any], again: int) -> None:
    model = built()
    plain, params, units = added(model), list(model.parameters()), alive("Unit")
    handle = model.head.register_forward_hook(lambda *_: None)  # a user's own, which stays
    onefold.shard(model, stage=stage, precision=precision, **fields)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.01)
    ema = onefold.EMA(model, 0.9)
    train(model, optimizer, range(2))
    trained = onefold.full_state_dict(model, every_rank=True)
    assert onefold.unshard(model) is model
    handle.remove()
    assert added(model) == plain
    assert all(ours is before for ours, before in zip(model.parameters(), params, strict=True))
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(params)
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, trained[name])
    assert alive("Unit") == units  # also while the old Optimizer and the EMA live
    group = {"params": params[:1]}
    ends = [optimizer.step, optimizer.zero_grad, optimizer.state_dict, ema.update, ema.restart, ema.full_state_dict]
    for refused in (*ends, lambda: optimizer.clip_grad_norm(1.0), lambda: optimizer.add_param_group(group)):
        with pytest.raises(onefold.StateError, match="unshard"):
            refused()
    with pytest.raises(onefold.ModelError, match="has not been sharded"):
        onefold.memory(model)

    other = built()  # plain torch, with the same values
    other.load_state_dict(trained)
    for net in (model, copy.deepcopy(model), other):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), range(2, 3))
    both = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in both)

    model.load_state_dict(trained)
    other.load_state_dict(trained)
    for net in (model, other):  # as if it had never been sharded
        onefold.shard(net, stage=again, precision=precision)
        train(net, onefold.Optimizer(net, torch.optim.AdamW, lr=0.01), range(2, 4))
    last = onefold.full_state_dict(model)
    for name, value in onefold.full_state_dict(other).items():
        assert torch.equal(value, last[name])


CASES = [
    (0, "fp32", {}, 3),
    (1, "bf16", {"activations": "checkpoint"}, 2),
    (2, "bf16", {"activations": "auto", "offload": "host"}, 3),
    (3, "fp32", {}, 1),
    (3, "bf16", {"activations": "checkpoint"}, 3),
    (3, "bf16", {"offload": onefold.Offload(optimizer="host", parameters="host")}, 2),
]


@pytest.mark.parametrize("stage, precision, fields, again", CASES)
def test_a_model_is_plain_again_and_can_be_sharded_again(
    stage: int, precision: str, fields: dict[str, Any], again: int
) -> None:
    run_ranks(RANKS, there_and_back, stage, precision, fields, again)


def keeps_dtypes() -> None:
    """What was 16-bit or fp64 before shard() is so again; a frozen parameter, too."""
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    for param in model.parameters():
        with torch.no_grad():
            param.copy_(param.bfloat16())
    before = copy.deepcopy(model.state_dict())
    onefold.shard(model, stage=3, precision="bf16")
    with torch.inference_mode():
        onefold.unshard(model)
    assert not any(param.is_inference() for param in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, False, True]
    for name, value in model.state_dict().items():
        assert value.dtype is before[name].dtype and torch.equal(value, before[name])


def test_parameters_have_their_dtypes_again() -> None:
    run_ranks(RANKS, keeps_dtypes)


def refused(model: nn.Module) -> str:
    with pytest.raises(onefold.OnefoldError) as caught:
        onefold.unshard(model)
    return str(caught.value)


def ask_too_early(stage: int) -> dict[str, str]:
    rank, said = torch.distributed.get_rank(), {}
    model = onefold.shard(built(), stage=stage)
    with onefold.full_parameters(model):
        said["full"] = refused(model)
    with onefold.accumulate(model):
        said["accumulate"] = refused(model)
    old = model(batch(0)).sum()
    with onefold.accumulate(model, reduce="once"):
        output = model(batch(0)).sum()
        if stage < 3 and rank == 1:
            output.backward()  # on one rank alone
    if stage < 3:
        said["gradients"] = refused(model)
    model.zero_grad()
    model(batch(0)).sum().backward()
    said["backward"] = refused(model)
    model.zero_grad()
    onefold.unshard(model)
    with pytest.raises(onefold.StateError) as caught:
        old.backward()
    said["old graph"] = str(caught.value)
    model(batch(0)).sum().backward()
    return said


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_unshard_is_refused_on_all_ranks_where_it_would_lose_something(stage: int) -> None:
    first, second = run_ranks(RANKS, ask_too_early, stage)
    assert "inside full_parameters" in first["full"] and "inside accumulate()" in first["accumulate"]
    assert "unshard" in first["old graph"] and "no step() has used" in first["backward"]
    if stage < 3:
        assert "rank 1 failed in unshard()" in first["gradients"]
        assert "no step() has used" in second["gradients"] and "zero_grad() first" in second["gradients"]
