"""full_parameters() without write=True is for reading: a write raises at its end, the same at every stage and on every
rank. With write=True all ranks write the same, or all raise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.users.runs import STAGES, built, differing, masters, net, train


def written(stage: int, precision: str) -> list[str]:
    said = []
    for nested in (False, True):
        model, optimizer = built(stage, precision)
        train(model, optimizer, range(1))
        try:
            with onefold.full_parameters(model), torch.no_grad():
                model.head.weight.fill_(0.5)
                if nested:
                    with onefold.full_parameters(model):
                        model.layers[1].norm.bias.add_(1.0)
        except onefold.StateError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_write_without_write_is_the_same_error_at_every_stage(precision: str) -> None:
    text = "was written inside full_parameters() without write=True; write inside onefold.full_parameters(model, "
    for stage in STAGES:
        for said in run_ranks(2, written, stage, precision):
            assert [line.partition(text)[0] for line in said] == ["head.weight ", "layers.1.norm.bias, head.weight "]


def not_written(stage: int, precision: str) -> list[str]:
    """Edits before it, a load, an inner write=True, forwards and reads are no writes of a reader."""
    model, optimizer = built(stage, precision)
    train(model, optimizer, range(1))
    if stage < 3:
        with torch.no_grad():
            model.head.bias.fill_(0.25)
    with onefold.full_parameters(model), torch.no_grad():
        model.load_state_dict(net().state_dict())
        with onefold.full_parameters(model, write=True):
            model.head.weight.mul_(0.5)
        model(torch.ones(2, 16))
    wanted = net().state_dict()
    wanted["head.weight"] = wanted["head.weight"] * 0.5
    state = masters(model)
    train(model, optimizer, range(1, 2))
    return differing(state, wanted) if precision == "fp32" else []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reader_may_load_run_forwards_and_write_in_an_inner_context(precision: str) -> None:
    for stage in STAGES:
        assert run_ranks(2, not_written, stage, precision) == [[], []]


def through_data(stage: int, precision: str) -> tuple[list[str], bool]:
    """What each way to write is answered; and whether reading afterwards raises nothing."""
    said = []
    for write in (clamp, swap_rows, add_on_rank_1, assign):
        model, optimizer = built(stage, precision)
        train(model, optimizer, range(1))
        try:
            with onefold.full_parameters(model):
                write(model.get_parameter("layers.1.up.weight"))
        except onefold.OnefoldError as error:
            said.append(f"{type(error).__name__}: {error}")
    model, optimizer = built(stage, precision)
    with onefold.full_parameters(model):
        sum(float(param.data.float().square().sum()) for param in model.parameters())
    train(model, optimizer, range(1))
    return said, True


def clamp(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.0625, 0.0625)


def swap_rows(weight: nn.Parameter) -> None:
    weight.data.copy_(weight.data.flip(0))


def add_on_rank_1(weight: nn.Parameter) -> None:
    if dist.get_rank() == 1:
        weight.data.add_(1.0)


def assign(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_write_through_data_is_the_same_error_on_every_rank_at_every_stage(precision: str) -> None:
    written = "StateError: layers.1.up.weight was written inside full_parameters() without write=True; write inside"
    for stage in STAGES:
        for rank, (said, _) in enumerate(run_ranks(2, through_data, stage, precision)):
            assert all(line.startswith(written) for line in said[:2]), said
            heard = "" if rank else "MismatchError: rank 1 failed in full_parameters(), so no rank goes on: "
            assert said[2].startswith(heard + written), said
            assert said[3].startswith("StateError: layers.1.up.weight left the flat buffer"), said


def rank_0_alone(stage: int, precision: str) -> tuple[list[str], bool]:
    """What ranks that wrote different values are told; whether they have one model afterwards, which trains."""
    said = []
    model, optimizer = built(stage, precision)
    model.first.weight.requires_grad_(False)
    train(model, optimizer, range(1))
    for through_data in (True, False):
        writing = onefold.full_parameters(model, write=True)
        with pytest.raises(onefold.MismatchError) as caught, torch.no_grad(), writing:
            if dist.get_rank() == 0:
                weight = model.head.weight
                (weight.data.fill_(0.25) if through_data else weight.fill_(0.5))
        said.append(str(caught.value))
    train(model, optimizer, range(1, 2))
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.head.bias.fill_(0.25)
    state = masters(model)
    with onefold.full_parameters(model):
        shown = {name: param.detach().clone() for name, param in model.named_parameters()}
    mine = [float(value.double().sum()) for value in (*state.values(), *shown.values())]
    theirs = [torch.zeros(len(mine), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(theirs, torch.tensor(mine, dtype=torch.float64))
    kept = bool((state["head.weight"] - 0.5).abs().max() < 0.01) and torch.all(state["head.bias"] == 0.25)
    return said, bool(kept) and torch.equal(*theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_that_write_different_values_all_raise_and_have_one_model(precision: str) -> None:
    for stage in STAGES:
        for said, alike in run_ranks(2, rank_0_alone, stage, precision):
            assert all("rank 1 differs from rank 0: rank 1 has [head.weight with bits " in line for line in said), said
            assert all("write the same values on every rank" in line for line in said) and alike


def frozen_on_rank_0(stage: int) -> tuple[str, float]:
    model = net()
    model.first.requires_grad_(False)
    onefold.shard(model, stage=stage)
    with pytest.raises(onefold.StateError, match=r"^first.bias was written"), onefold.full_parameters(model):
        model.first.bias.data.add_(1.0)
    with onefold.full_parameters(model):
        model.load_state_dict(net().state_dict())
    writing = onefold.full_parameters(model, write=True)
    with pytest.raises(onefold.MismatchError) as caught, torch.no_grad(), writing:
        model.first.bias.fill_(0.5 + dist.get_rank())
    return str(caught.value), float(masters(model)["first.bias"].mean())


@pytest.mark.parametrize("stage", STAGES)
def test_writes_to_frozen_parameters_are_found_too(stage: int) -> None:
    for said, mean in run_ranks(2, frozen_on_rank_0, stage):
        assert "rank 1 has [first.bias with bits " in said and mean == 0.5
