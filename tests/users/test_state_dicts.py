"""state_dict() and load_state_dict() of a 16-bit model: what was saved comes back, and masters keep what they know."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.users.runs import STAGES, built, differing, masters, train

SPLIT = onefold.Precision(compute="bf16", master="split")
HOST = onefold.Offload(optimizer="host")


def saved(model: nn.Module, stage: int) -> dict[str, Tensor]:
    with onefold.full_parameters(model) if stage == 3 else nullcontext():
        return {name: value.clone() for name, value in model.state_dict().items()}


def loaded_again(stage: int, precision: Any, offload: Any) -> list[str]:
    """Two runs, one of which saves and loads its own 16-bit state between steps: their masters, at the end."""
    ends = []
    for loads in (False, True):
        model, optimizer = built(stage, precision, offload=offload)
        train(model, optimizer, range(4))
        if loads:
            before = masters(model)
            model.load_state_dict(saved(model, stage))
            assert differing(before, masters(model)) == []
        train(model, optimizer, range(4, 6))
        ends.append(masters(model))
    return differing(*ends)


@pytest.mark.parametrize("stage", STAGES)
def test_loading_the_16_bit_state_a_model_has_keeps_its_masters(stage: int) -> None:
    for precision, offload in (("bf16", None), (SPLIT, None), ("bf16", HOST if stage else None)):
        assert run_ranks(2, loaded_again, stage, precision, offload) == [[], []], (precision, offload)


def loaded_in_part(stage: int, precision: Any) -> tuple[bool, bool, bool]:
    """Of a tensor that differs in some elements those get the value loaded, exactly, and the others keep theirs."""
    model, optimizer = built(stage, precision)
    train(model, optimizer, range(4))
    before, state = masters(model), saved(model, stage)
    state["layers.1.norm.weight"][::2] = 0.75
    state["head.weight"] = torch.full_like(state["head.weight"], 1.0, dtype=torch.float32) + 2**-20  # no bf16 value
    model.load_state_dict(state)
    after = masters(model)
    norm, was = after["layers.1.norm.weight"], before["layers.1.norm.weight"]
    changed, kept = bool((norm[::2] == 0.75).all()), torch.equal(norm[1::2], was[1::2])
    head = bool((after["head.weight"] == 1.0 + 2**-20).all())
    return changed, kept, head


@pytest.mark.parametrize("stage", STAGES)
def test_elements_loaded_with_another_value_get_it_and_the_others_keep_their_masters(stage: int) -> None:
    for precision in ("bf16", SPLIT):
        assert run_ranks(2, loaded_in_part, stage, precision) == [(True, True, True)] * 2


def reset_to_ones(stage: int) -> bool:
    """fp32 values are meant as they are: a 1.0 replaces a master that rounds to it."""
    model, optimizer = built(stage, lr=1e-5)
    train(model, optimizer, range(3))
    state = masters(model)
    assert not bool((state["layers.0.norm.weight"] == 1.0).any())  # but all of them round to 1.0
    state["layers.0.norm.weight"] = torch.ones_like(state["layers.0.norm.weight"])
    model.load_state_dict(state)
    return differing(state, masters(model)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_values_loaded_replace_the_masters_bit_for_bit(stage: int) -> None:
    assert run_ranks(2, reset_to_ones, stage) == [True, True]


def swapped(stage: int) -> list[str]:
    """An average is swapped in for evaluation, and the masters back: training goes on as if nothing had been."""
    ends = []
    for swaps in (False, True):
        model, optimizer = built(stage)
        train(model, optimizer, range(3))
        if swaps:
            mine = masters(model)
            model.load_state_dict({name: value * 0.9 for name, value in mine.items()})
            model.load_state_dict(mine)
        train(model, optimizer, range(3, 5))
        ends.append(masters(model))
    return differing(*ends)


@pytest.mark.parametrize("stage", STAGES)
def test_masters_swapped_out_and_in_again_are_the_same_bits(stage: int) -> None:
    assert run_ranks(2, swapped, stage) == [[], []]
