"""What one rank does and the others do not: every rank raises in the same step, with both sides named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.models import Stack, blocks
from tests.users.runs import STAGES, built, net, train


def loads_on_rank_0(stage: int, precision: str, inside: bool) -> None:
    model, optimizer = built(stage, precision, step_in_backward=inside, timeout_s=5.0)
    train(model, optimizer, range(2))
    if dist.get_rank() == 0:
        model.load_state_dict(net().state_dict())
    train(model, optimizer, range(2, 3))


@pytest.mark.parametrize(("stage", "precision", "inside"), thinned(STAGES, ("fp32", "bf16"), (False, True)))
def test_a_load_on_one_rank_alone_raises_on_every_rank(stage: int, precision: str, inside: bool) -> None:
    for error in run_ranks_raises(2, loads_on_rank_0, stage, precision, inside):
        assert error.type_name == "MismatchError", error
        assert "rank 1 has [nothing more], rank 0 has [1 x load_state_dict() of first]" in error.message
        assert "without 'if rank == 0'" in error.message


def plateaus(stage: int, inside: bool, tensor: bool) -> None:
    """Losses of rank 0 stay, those of rank 1 fall: ReduceLROnPlateau lowers rank 0's rates in the second step."""
    onefold.init()
    model = onefold.shard(net(), stage=stage, bucket_bytes=2 << 10)
    groups = [{"params": model.first.parameters()}, {"params": model.layers.parameters(), "lr": 0.25}]
    lr: Any = torch.tensor(0.5) if tensor else 0.5
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=lr, groups=groups, step_in_backward=inside)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, min_lr=[0.5, 0.0])
    for step in range(4):
        assert step < 3
        train(model, optimizer, range(step, step + 1))
        plateau.step(1.0 - 0.5 * step * dist.get_rank())


@pytest.mark.parametrize(("stage", "way"), thinned(STAGES, ("in step()", "inside backward", "a tensor")))
def test_learning_rates_that_differ_by_rank_raise_on_every_rank_with_both_values_and_the_group(
    stage: int, way: str
) -> None:
    for error in run_ranks_raises(2, plateaus, stage, way == "inside backward", way == "a tensor"):
        assert error.type_name == "MismatchError", error
        assert "rank 1 has [lr=0.25 in param group 1], rank 0 has [lr=0.125 in param group 1]" in error.message
        assert "mean of all ranks' losses" in error.message


def words_differ(stage: int, name: str, words: list[str | None]) -> None:
    onefold.init()
    model = onefold.shard(net(), stage=stage, bucket_bytes=2 << 10)
    optimizer = onefold.Muon(model, ns_steps=1)
    optimizer.param_groups[0][name] = words[dist.get_rank()]
    train(model, optimizer, range(1))


@pytest.mark.parametrize(
    ("stage", "name", "words"),
    [(2, "ns_dtype", ["bf16", "fp32"]), (0, "adjust_lr_fn", [None, "match_rms_adamw"])],
)
def test_settings_that_are_words_and_differ_by_rank_raise_on_every_rank(
    stage: int, name: str, words: list[str | None]
) -> None:
    """With `ns_dtype` ranks would send each other messages of other lengths."""
    for error in run_ranks_raises(2, words_differ, stage, name, words):
        assert error.type_name == "MismatchError", error
        there, here = (f"{name}={word} in param group 0" for word in reversed(words))
        assert f"rank 1 has [{there}], rank 0 has [{here}]" in error.message


def set_right(stage: int) -> bool:
    """After the error: the same rate on every rank, and the same load, and training goes on."""
    model, optimizer = built(stage, "bf16")
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    with pytest.raises(onefold.MismatchError, match=r"lr=0.2 in param group 0"):
        train(model, optimizer, range(1, 2))  # at stage 0 in backward, else in step()
    optimizer.param_groups[0]["lr"] = 0.1
    if stage:
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(net().state_dict())
    train(model, optimizer, range(2, 4))
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_once_ranks_have_the_same(stage: int) -> None:
    assert run_ranks(2, set_right, stage) == [True, True]


def submodule_on_rank_1() -> None:
    model, optimizer = built(2, "fp32")
    backbone: nn.Module = model.layers
    if dist.get_rank() == 1:
        backbone.load_state_dict(net().layers.state_dict())
    train(model, optimizer, range(1))


def test_a_load_of_a_submodule_on_one_rank_names_it() -> None:
    for error in run_ranks_raises(2, submodule_on_rank_1):
        assert "rank 1 has [1 x load_state_dict() of layers.0.down], rank 0 has [nothing more]" in error.message


def two_optimizers(stage: int, which: int) -> None:
    model = onefold.shard(Stack(blocks(2), nn.Linear(16, 4), nn.Linear(16, 16)), stage=stage)
    parts = (model.first, model.head)
    both = [onefold.Optimizer(model, torch.optim.SGD, groups=[{"params": p.parameters()}], lr=0.1) for p in parts]
    with pytest.raises(onefold.MismatchError, match=rf"rank 1 has \[lr=1.1 in param group {which}\]"):
        for _ in range(2):
            both[which].param_groups[0]["lr"] = 0.1 + dist.get_rank()
            model(torch.ones(2, 16)).sum().backward()
            for optimizer in both:
                optimizer.step()
            model.zero_grad()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_learning_rates_of_each_of_several_optimizers_are_compared(stage: int, which: int) -> None:
    run_ranks(2, two_optimizers, stage, which)
