"""Blocks, graphs and loops that are not the usual ones: they train as without us, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.activations.store import KeptInput
from onefold.runtime.engine import engine_of
from tests.activations.runs import DIM, POLICIES, batch, made
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.models import CheckpointInside, DropoutBlock, ManyInputsNet, RunAgain, Squaring, Tower, Turned, WritingInput

Turn = Callable[[nn.Module, int], Any]


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    return model(batch(step, 0)).square().mean()


def learn(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def twice(model: nn.Module, step: int) -> None:
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model: nn.Module, step: int) -> None:
    """A gradient of a gradient."""
    torch.manual_seed(step)
    x = batch(step, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()


def many(model: nn.Module, step: int) -> None:
    """Three forwards, backwards in another order, one never."""
    losses = [loss_of(model, 10 * step + i) for i in range(3)]
    (losses[0] + 2 * losses[2]).backward()


def evaluate(model: nn.Module, step: int) -> None:
    loss = loss_of(model, step)
    with torch.no_grad():
        loss_of(model, step + 1)
    loss.backward()


def gradients(model: nn.Module, optimizer: Any) -> list[Tensor]:
    optimizer.step()
    optimizer.zero_grad()
    with onefold.full_parameters(model):
        return [param.detach().clone() for param in model.parameters()]


def differences(build: dict[str, Any], turn: Turn, stage: int, policies: tuple[str, ...]) -> list[str]:
    """On a rank: which policies do not train as "keep" does."""
    found: dict[str, list[Tensor]] = {}
    for policy in ("keep", *policies):
        torch.manual_seed(3)
        net = Tower(**build)
        model, optimizer = made(policy, stage, net)
        for step in range(2):
            turn(model, step)
            found[policy] = gradients(model, optimizer)
        if engine_of(model).checkpoints:
            assert engine_of(model).checkpoints.arena.in_use == 0
    return [p for p in policies if not all(torch.equal(a, b) for a, b in zip(found[p], found["keep"], strict=True))]


CASES: dict[str, tuple[dict[str, Any], Turn]] = {
    "a checkpoint inside": ({"block": CheckpointInside}, learn),
    "a checkpoint around": ({"block": DropoutBlock, "around": False}, learn),
    "a reentrant one": ({"block": DropoutBlock, "around": True}, learn),
    "inputs written in place": ({"block": WritingInput}, learn),
    "strides": ({"block": Turned}, learn),
    "frozen below": ({"block": DropoutBlock, "frozen": 1}, learn),
    "backward twice": ({"block": DropoutBlock}, twice),
    "a gradient of a gradient": ({"block": DropoutBlock}, penalty),
    "forwards in another order": ({"block": DropoutBlock}, many),
    "evaluation in between": ({"block": DropoutBlock}, evaluate),
}


@pytest.mark.parametrize(("name", "stage"), thinned(CASES, [2, 3]))
def test_unusual_blocks_and_loops_train_to_the_same_bits(name: str, stage: int) -> None:
    build, turn = CASES[name]
    policies = ("checkpoint",) if "around" in build else ("checkpoint", "checkpoint+host")
    assert run_ranks(2, differences, build, turn, stage, policies) == [[], []]


@pytest.mark.parametrize("name", ["a checkpoint inside", "strides", "backward twice", "forwards in another order"])
def test_unusual_blocks_and_loops_share_their_inputs(name: str) -> None:
    assert run_ranks(2, differences, *CASES[name], 2, ("partition", "partition+host")) == [[], []]


def ahead(policy: str) -> list[int]:
    """How many inputs of other blocks are on their way, whenever a block is computed again."""
    model, _ = made(policy, 2, Tower(RunAgain, 5))
    started, seen = set[KeptInput](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        plain_start, plain_bring = KeptInput.start_restore, KeptInput.restore

        def start(kept: KeptInput) -> None:
            plain_start(kept)
            started.add(kept)

        def bring(kept: KeptInput) -> Tensor:
            tensor = plain_bring(kept)
            started.discard(kept)
            return tensor

        patch.setattr(KeptInput, "start_restore", start)
        patch.setattr(KeptInput, "restore", bring)
        for block in model.blocks:
            block.on_again = lambda: seen.append(len(started))
        learn(model, 0)
    return seen


@pytest.mark.parametrize("policy", ["checkpoint+host", "partition", "partition+host"])
def test_while_a_block_computes_the_input_of_the_one_before_it_is_on_its_way(policy: str) -> None:
    assert run_ranks(2, ahead, policy) == [[1, 1, 1, 1, 0]] * 2


# -- errors ------------------------------------------------------------------------------------------------------------


def fail() -> None:
    raise RuntimeError("computed again, and failed")


def survive(policy: str, stage: int) -> list[Any]:
    """One step fails inside recomputation; those after it must be as if it had not been."""
    after = []
    for fails in (False, True):
        torch.manual_seed(3)
        model, optimizer = made(policy, stage, Tower(RunAgain))
        learn(model, 0)
        gradients(model, optimizer)
        if fails:
            model.blocks[2].on_again = fail
            with pytest.raises(RuntimeError, match="computed again, and failed"):
                learn(model, 1)
            model.blocks[2].on_again = lambda: None
            optimizer.zero_grad()
        learn(model, 2)
        in_use = engine_of(model).checkpoints.arena.in_use
        after.append((gradients(model, optimizer), in_use, onefold.memory(model).checkpoints))
    (first, in_use, kept), (second, in_use_too, kept_too) = after
    return [all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), in_use, in_use_too, kept == kept_too]


@pytest.mark.parametrize(("policy", "stage"), thinned(POLICIES[1:], [2, 3]))
def test_an_error_inside_recomputation_unwinds_and_the_next_step_works(policy: str, stage: int) -> None:
    assert run_ranks(2, survive, policy, stage) == [[True, 0, 0, True]] * 2


def own_batches(model: nn.Module, step: int) -> None:
    model(batch(step, dist.get_rank())).sum().backward()


REFUSED = {
    "no tp": (("partition", ManyInputsNet, learn), {"mesh": None}, "mesh axis 'tp', and there is none"),
    "no blocks": (("checkpoint", lambda: nn.Linear(DIM, DIM), learn), {}, "this model has none"),
    "nothing to offload": (
        ("checkpoint+host", lambda: Tower(DropoutBlock, 2, around=False), learn), {}, "nothing to do",
    ),
    "other batches": (("partition", ManyInputsNet, own_batches), {}, "not the same on all 2 ranks"),
    "in place, twice": (("checkpoint", lambda: Tower(WritingInput), twice), {}, "writes to its input in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_apply_raises_and_says_why(name: str) -> None:
    for error in run_ranks_raises(2, refused, name):
        assert error.type_name in ("ConfigError", "StateError")
        assert REFUSED[name][2] in error.message


def refused(name: str) -> None:
    (policy, build, turn), fields, _ = REFUSED[name]
    model, _ = made(policy, 2, build(), **fields)
    turn(model, 0)


def sequence_parallel(policy: str) -> None:
    """Block inputs are DTensors that are cut along the sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model, _ = made(policy, 2, Tower(Squaring, 2), mesh=mesh)
    x = distribute_tensor(batch(0, 0), mesh["tp"], [Shard(1)])
    x.requires_grad_()
    model.body(x * 1).sum().backward()
    assert x.grad is not None and x.grad.placements == (Shard(1),)


def test_inputs_that_are_split_over_tp_are_not_shared_but_may_be_kept() -> None:
    for policy in ("partition", "partition+host"):
        for error in run_ranks_raises(2, sequence_parallel, policy):
            assert error.type_name == "ConfigError" and "sequence parallelism" in error.message
    run_ranks(2, sequence_parallel, "checkpoint")


def no_grad() -> tuple[int, int, bool]:
    model, _ = made("checkpoint", 3)
    with torch.no_grad():
        model(batch(0, 0))
    unused = onefold.memory(model).checkpoints.measured
    loss = model(batch(0, 0)).sum()
    used = onefold.memory(model).checkpoints.measured
    del loss
    return unused, used, engine_of(model).checkpoints.arena.in_use == 0


def test_evaluation_keeps_nothing_and_a_graph_let_go_frees_its_inputs() -> None:
    for unused, used, free in run_ranks(2, no_grad):
        assert unused == 0 < used and free
