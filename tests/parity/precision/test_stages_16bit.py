"""In bf16 and fp16, as in fp32, all stages give the same bits; so do both forms of the master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import Precision
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.parity.test_stages import SHARDED, assert_equal_across_stages
from tests.parity.training import Run, differing, train

SPLIT = Precision(compute="bf16", master="split")
POLICIES: dict[str, str | Precision] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "split": SPLIT,
    "bf16, fp32 on the wire": Precision(compute="bf16", wire="fp32"),
    "bf16, fp32 gradients": Precision(compute="bf16", grad="fp32"),
    "bf16, fp32 norms": Precision(compute="bf16", keep_fp32=nn.LayerNorm),
}


def run_in(policy: str, **fields: Any) -> Run:
    return Run(fields=(("precision", POLICIES[policy]),), **fields)


@pytest.mark.parametrize(("policy", "ranks"), thinned(["bf16", "fp16", "split"], [1, 2, 3, 4]))
def test_stages_are_bitwise_equal_at_every_number_of_ranks(policy: str, ranks: int) -> None:
    assert_equal_across_stages(ranks, run_in(policy, clip=0.5, grouped=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_stages_are_bitwise_equal_for_every_policy(policy: str) -> None:
    assert_equal_across_stages(2, run_in(policy, optimizer="adamw-fused"))


@pytest.mark.parametrize(
    ("model", "policy"), thinned(["gpt-tied", "gpt-checkpoint", "skipping", "odd"], ["fp16", "split"])
)
def test_stages_are_bitwise_equal_for_other_models(model: str, policy: str) -> None:
    assert_equal_across_stages(2, run_in(policy, model=model))


@pytest.mark.parametrize(("reduce", "policy"), thinned(["once", "each"], ["bf16", "fp16", "split"]))
def test_stages_are_bitwise_equal_under_accumulation(reduce: str, policy: str) -> None:
    assert_equal_across_stages(3, run_in(policy, micro=2, reduce=reduce, clip=0.5))


@pytest.mark.parametrize("optimizer", ["adam", "adamw-fused", "sgd", "sgd-momentum", "adagrad"])
def test_stages_are_bitwise_equal_for_every_optimizer(optimizer: str) -> None:
    assert_equal_across_stages(2, run_in("bf16", optimizer=optimizer))


def compare_masters(stage: int, optimizer: str) -> list[str]:
    plain = train(run_in("bf16", stage=stage, optimizer=optimizer, steps=8, clip=0.5))
    parts = train(run_in("split", stage=stage, optimizer=optimizer, steps=8, clip=0.5))
    assert plain.params["head.weight"].dtype is torch.bfloat16
    return differing(plain, parts) + [f"loss {a}, {b}" for a, b in zip(plain.losses, parts.losses) if a != b]


@pytest.mark.parametrize(("optimizer", "stage"), thinned(["adamw-fused", "sgd-momentum"], [0, *SHARDED]))
def test_a_split_master_trains_to_the_bits_of_a_plain_one(optimizer: str, stage: int) -> None:
    assert run_ranks(2, compare_masters, stage, optimizer) == [[], []]


def masters(stage: int, precision: str | Precision) -> dict[str, torch.Tensor]:
    """Masters of a state dict that fp32 wrote, after it was loaded; before and after a step of learning rate 0."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3)).state_dict()
    torch.manual_seed(1)
    model = onefold.shard(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3)), stage=stage, precision=precision)
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=0.0)
    model.load_state_dict(source)
    state = onefold.full_state_dict(model)
    sgd.backward(model(torch.ones(2, 24)).sum())
    sgd.step()
    after = onefold.full_state_dict(model)
    with onefold.full_parameters(model):
        rounded = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(p.dtype is model[0].weight.dtype for p in rounded.values())
    for name, value in state.items():
        assert torch.equal(value, source[name]), "the master lost something when it was loaded"
        assert torch.equal(value, after[name]), "a step of nothing changed the master"
        assert torch.allclose(rounded[name].float(), source[name], rtol=2**-8)
    return state


@pytest.mark.parametrize(("policy", "stage"), thinned(["bf16", "fp16", "split"], [0, *SHARDED]))
def test_a_whole_fp32_state_goes_through_the_master_unrounded(policy: str, stage: int) -> None:
    states = run_ranks(2, masters, stage, POLICIES[policy])
    assert len(states[0]) == 4 and not states[1]


def edit(stage: int, precision: str | Precision) -> bool:
    """Edited values become the truth; what was left alone keeps its fp32 digits."""
    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(16, 16), stage=stage, precision=precision)
    before = onefold.full_state_dict(model)
    with onefold.full_parameters(model, write=True), torch.no_grad():
        model.weight[3].fill_(0.5)
    after = onefold.full_state_dict(model)
    if not after:
        return True
    others = torch.arange(16) != 3
    return bool((after["weight"][3] == 0.5).all()) and torch.equal(after["weight"][others], before["weight"][others])


@pytest.mark.parametrize(("policy", "stage"), thinned(["bf16", "split"], [0, *SHARDED]))
def test_values_written_by_hand_reach_the_master(policy: str, stage: int) -> None:
    assert run_ranks(2, edit, stage, POLICIES[policy]) == [True, True]
