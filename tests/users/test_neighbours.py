"""What users bring from elsewhere: parameters of two models, devices by another name, DCP, safetensors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.parity.training import same_bits


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(call: object, *args: object, **fields: object) -> str:
    assert callable(call)
    with pytest.raises(onefold.OnefoldError) as caught:
        call(*args, **fields)
    return f"{type(caught.value).__name__}: {caught.value}"


def share(stage: int) -> tuple[str, bool]:
    """What the second shard() says; whether the first model still trains, and frees its parameters when it is gone."""
    one = built()
    other = nn.Sequential(one[0], nn.Linear(4, 3))
    onefold.shard(one, stage=stage)
    said = refused(onefold.shard, other, stage=stage)
    optimizer = onefold.Optimizer(one, torch.optim.SGD, lr=0.1)
    before = onefold.full_state_dict(one)
    step(one, optimizer)
    after = onefold.full_state_dict(one)
    return said, all(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_of_two_models_is_refused_by_the_second_shard(stage: int) -> None:
    for said, trains in run_ranks(2, share, stage):
        assert said.startswith("ModelError: 0.weight is a parameter of another sharded model") and trains


def move(stage: int) -> list[str]:
    """An equal device or dtype is no move, of the model or of a part of it; what another says."""
    model = onefold.shard(nn.Sequential(built(), nn.Linear(2, 2)), stage=stage, precision="bf16")
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    parts = (model, model[0], model[0][0], model[1])
    for part in parts:
        for device in ("cpu:0", "cpu", torch.device("cpu", 0)):
            assert part.to(device) is part
        assert part.bfloat16() is part and part.cpu() is part and part.to(torch.bfloat16) is part
        step(model, optimizer)
    said = [refused(part.to, form) for part in parts for form in (torch.float32, torch.float64, "meta")]
    step(model, optimizer)
    if stage < 3:
        copied = copy.deepcopy(model[0])  # is a plain module
        assert copied.float()[0].weight.dtype is torch.float32 and copied.double()[2].bias.dtype is torch.float64
        assert copy.deepcopy(copied).half()[0].weight.dtype is torch.float16 and copied[0].weight.is_leaf
    onefold.unshard(model)
    assert model[0].float()[0].weight.dtype is torch.float32
    return said


@pytest.mark.parametrize("stage", range(4))
def test_an_equal_device_is_no_move_and_another_is_refused_for_every_part(stage: int) -> None:
    for said in run_ranks(2, move, stage):
        for number, found in enumerate(("torch.float32 on cpu", "torch.float64 on cpu", "torch.bfloat16 on meta")):
            text = f"StateError: a sharded model's parameters are views of flat buffers and cannot become {found} (they"
            assert all(line.startswith(text) for line in said[number::3]), said


def use_dcp(stage: int) -> list[str]:
    """What DCP's functions say; nothing is changed by them."""
    model = onefold.shard(built(), stage=stage)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    said = [refused(dcp.get_optimizer_state_dict, model, optimizer)]
    said += [refused(dcp.set_optimizer_state_dict, model, optimizer, {"state": {}, "param_groups": []})]
    if stage < 3:
        said += [refused(dcp.get_state_dict, model, optimizer)]
        kept = dcp.get_model_state_dict(model)
        assert all(same_bits(value, kept[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1 and all(p.grad is None for p in model.parameters())
    step(model, optimizer)
    return said


@pytest.mark.parametrize("stage", range(4))
def test_dcp_is_refused_with_the_remedy_before_it_changes_anything(stage: int) -> None:
    for said in run_ranks(2, use_dcp, stage):
        assert all(line.startswith("StateError") and "onefold.save(" in line for line in said), said


def through_safetensors(stage: int, folder: Path) -> None:
    model = onefold.shard(built(), stage=stage)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    step(model, optimizer)
    file = folder / f"{stage}-{dist.get_rank()}.safetensors"
    save_model(model, str(file))
    saved = load_file(file)
    assert all(same_bits(value, saved[name]) for name, value in model.state_dict().items()) and len(saved) == 4
    step(model, optimizer)
    load_model(model, str(file))
    assert all(same_bits(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", range(3))
def test_safetensors_saves_and_loads_a_model_whose_parameters_are_replicated(stage: int, tmp_path: Path) -> None:
    run_ranks(2, through_safetensors, stage, tmp_path)
