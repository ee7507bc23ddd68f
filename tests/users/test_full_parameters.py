"""full_parameters() without write=True is for reading: a write raises at its end, the same at every stage."""

from __future__ import annotations

import pytest
import torch

import onefold
from tests.harness import run_ranks, run_ranks_raises
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


def through_data() -> bool:
    model, _ = built(3)
    with onefold.full_parameters(model):
        for param in model.parameters():
            param.data.fill_(0.5)
    return False


def test_at_stage_3_a_write_through_data_raises_too() -> None:
    for error in run_ranks_raises(2, through_data):
        assert error.type_name == "StateError" and "was written inside full_parameters()" in error.message
