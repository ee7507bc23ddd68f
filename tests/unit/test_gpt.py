"""The built-in GPT: its parameters are those of its shape, and it is filled as GPT-2 is, also from the meta device."""

from functools import partial

import pytest
import torch

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT, initialise
from tests.harness import run_ranks

SHAPE = Shape(layers=8, hidden=128, heads=4, seq=32, vocab=512)


def test_the_model_has_the_parameters_of_its_shape():
    with torch.device("meta"):
        model = GPT(SHAPE)
    assert {name: param.numel() for name, param in model.named_parameters()} == {
        part.name: part.numel for part in SHAPE.parts()
    }


def filled() -> dict[str, float]:
    onefold.init()
    with torch.device("meta"):
        model = GPT(SHAPE)
    onefold.shard(model, stage=3, init=partial(initialise, layers=SHAPE.layers))
    return {name: float(value.std()) for name, value in onefold.full_state_dict(model).items()}


def test_a_model_from_meta_is_filled_as_gpt2_is_with_less_at_the_end_of_branches():
    spread = run_ranks(2, filled)[0]
    assert spread["wte.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["blocks.0.attention.qkv.weight"] == pytest.approx(0.02, rel=0.05)
    for last in ("blocks.7.attention.out.weight", "blocks.0.mlp.down.weight"):
        assert spread[last] == pytest.approx(0.02 / 4, rel=0.05)
