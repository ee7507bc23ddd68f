"""Writes through .data to 16-bit parameters, which torch does not count: the next step starts from what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.users.runs import WIDTH, built, differing, masters, train

SPLIT = onefold.Precision(compute="bf16", master="split")
HOST = onefold.Offload(optimizer="host")
NAME = "layers.1.up.weight"


def write(model: nn.Module, kind: str, through_data: bool) -> None:
    """Half of the elements of a weight; the others keep what 16 bits do not show."""
    weight = model.get_parameter(NAME)
    with torch.no_grad():
        half = (weight.data if through_data else weight)[::2]
        if kind == "clamp":
            half.clamp_(-0.0625, 0.0625)
        else:
            half.normal_(generator=torch.Generator().manual_seed(7))


def edited(stage: int, kind: str, fields: dict[str, Any]) -> tuple[list[str], bool]:
    """A run with a write through .data, beside one with the same write in full_parameters, where elements count."""
    ends, seen = [], []
    for through_data in (True, False):
        model, optimizer = built(stage, **fields)
        train(model, optimizer, range(3))
        if through_data:
            write(model, kind, True)
        else:
            with onefold.full_parameters(model, write=True):
                write(model, kind, False)
        before = model.get_parameter(NAME).detach().clone()
        train(model, optimizer, range(3, 4))
        seen.append(float((model.get_parameter(NAME).float() - before.float()).abs().max()))
        train(model, optimizer, range(4, 5))
        ends.append(masters(model))
    return differing(*ends), max(seen) < 0.01


WAYS: list[dict[str, Any]] = [
    {},
    {"step_in_backward": True},
    {"cls": torch.optim.SGD},
    {"cls": torch.optim.Adagrad},
    {"offload": HOST},
    {"offload": "disk"},
    {"offload": HOST, "cls": torch.optim.Adagrad},
]


@pytest.mark.parametrize(("stage", "way", "kind"), thinned((0, 1, 2), range(len(WAYS)), ("clamp", "normal")))
def test_a_write_through_data_is_the_write_that_full_parameters_takes_bit_for_bit(
    stage: int, way: int, kind: str, tmp_path: Path
) -> None:
    if stage == 0 and "offload" in WAYS[way]:
        pytest.skip("stage 0 does not offload")
    fields = WAYS[way]
    if fields.get("offload") == "disk":
        fields = {"offload": onefold.Offload(optimizer="disk", path=str(tmp_path))}
    assert run_ranks(2, edited, stage, kind, fields) == [([], True)] * 2


def split_edited(stage: int) -> tuple[bool, bool]:
    """A split master keeps its remainders, so what is written counts to the precision of bf16."""
    model, optimizer = built(stage, SPLIT)
    train(model, optimizer, range(3))
    before = masters(model)[NAME]
    write(model, "clamp", True)
    shown, after = model.get_parameter(NAME).detach().float(), masters(model)[NAME]
    kept = torch.equal(before[1::2], after[1::2])
    train(model, optimizer, range(3, 4))
    moved = (masters(model)[NAME] - shown).abs().max()
    return kept and bool((after.bfloat16().float() - shown).abs().max() < 2e-3), bool(moved < 0.01)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_split_master_takes_what_is_written_to_the_precision_of_bf16(stage: int) -> None:
    assert run_ranks(2, split_edited, stage) == [(True, True)] * 2


def saved_between(stage: int) -> list[float]:
    """What is written is in the masters at once: a state dict, and a checkpoint, have it."""
    model, optimizer = built(stage)
    train(model, optimizer, range(2))
    model.head.weight.data.fill_(0.5)
    model.head.bias.data.zero_()
    state = masters(model)
    return [state["head.weight"].mean().item(), state["head.bias"].abs().max().item()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_dicts_hold_what_was_written_through_data(stage: int) -> None:
    assert run_ranks(2, saved_between, stage) == [[0.5, 0.0]] * 2


def at_stage_3() -> list[str]:
    """Parameters are placeholders between forwards: the write itself is refused, or the next forward raises."""
    said = []
    for kind in ("clamp_", "normal_", "zero_"):
        model, optimizer = built(3)
        train(model, optimizer, range(1))
        try:
            getattr(model.head.weight.data, kind)(*([-1.0, 1.0] if kind == "clamp_" else []))
            train(model, optimizer, range(1, 2))
        except onefold.StateError as error:
            said.append(type(error).__name__)
    return said


def test_a_write_through_data_to_a_sharded_parameter_raises() -> None:
    for said in run_ranks(2, at_stage_3):
        assert said == ["StateError"] * 3


def untouched(stage: int) -> bool:
    """Without a write nothing is taken for one: the masters are those of plain torch on an fp32 copy."""
    model, optimizer = built(stage, lr=1e-4)
    train(model, optimizer, range(6))
    state = masters(model)
    return all(bool((value.bfloat16().float() != value).any()) for value in state.values() if value.numel() > WIDTH)


@pytest.mark.parametrize("stage", [0, 2])
def test_without_a_write_masters_keep_more_than_16_bits(stage: int) -> None:
    assert run_ranks(2, untouched, stage) == [True, True]
