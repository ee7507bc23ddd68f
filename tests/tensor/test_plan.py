"""The built-in GPT's plan: what it cannot cut it refuses, what it returns is whole, what it holds was planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import run_ranks, run_ranks_raises
from tests.tensor.runs import SHAPE, Run, built, fresh, tokens, train, turn


def logits(sequence: bool, stage: int) -> torch.Tensor:
    model, _ = built(Run(1, 2, stage, sequence), onefold.mesh(shard=1, tp=2))
    with torch.no_grad():
        return model(tokens(0, 0, 0)[0])


@pytest.mark.parametrize("sequence", [False, True])
def test_logits_come_out_whole_on_every_rank(sequence: bool) -> None:
    wanted = fresh()(tokens(0, 0, 0)[0]).detach()
    for found in run_ranks(2, logits, sequence, 2):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def sizes(tp: int) -> dict[str, int]:
    model = parallelize(fresh(), onefold.mesh(shard=1, tp=tp))
    return {name: getattr(param, "_local_tensor", param).numel() for name, param in model.named_parameters()}


def test_a_rank_holds_what_the_planner_counts() -> None:
    assert run_ranks(2, sizes, 2)[0] == {part.name: part.numel for part in SHAPE.parts(tp=2)}


def too_few_heads() -> None:
    shape = Shape(layers=1, hidden=12, heads=3, seq=8, vocab=16)
    parallelize(GPT(shape), onefold.mesh(shard=1, tp=2))


def odd_sequence() -> None:
    model, _ = built(Run(1, 2, sequence=True), onefold.mesh(shard=1, tp=2))
    model(torch.zeros(1, 7, dtype=torch.long))


def after_shard() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    parallelize(onefold.shard(fresh(), stage=1, mesh=mesh), mesh)


@pytest.mark.parametrize(
    ("act", "error", "found"),
    [
        (too_few_heads, "ConfigError", "heads=3 cannot be cut over tp=2"),
        (odd_sequence, "ConfigError", "a sequence of 7 tokens cannot be cut over tp=2"),
        (after_shard, "StateError", "call parallelize() first"),
    ],
)
def test_what_cannot_be_cut_is_refused(act: Callable[[], None], error: str, found: str) -> None:
    for caught in run_ranks_raises(2, act):
        assert caught.type_name == error and found in caught.message, caught


@pytest.mark.parametrize(
    ("precision", "levels"),
    [pytest.param("bf16", (0, 1, 2, 3), marks=pytest.mark.soak), ("bf16", (0, 3)), ("fp16", (1, 2))],
)
def test_sixteen_bits_train_to_the_same_bits_at_every_stage(precision: str, levels: tuple[int, ...]) -> None:
    run = Run(2, 2, sequence=True, steps=2, fields=(("precision", precision),))
    stages = [run.at(stage) for stage in levels]
    whole, first, *others = run_ranks(4, train, [Run(2, 2, sequence=True, steps=2), *stages])[0]
    assert first.losses == pytest.approx(whole.losses, rel=0.1)  # fp16 skips a step until its scale fits
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(a, b) for a, b in zip(other.norms, first.norms, strict=True))
        assert all(torch.equal(value, first.params[name]) for name, value in other.params.items())


def overflow_on_one_rank(clip: bool) -> tuple[bool, float]:
    """In a part of a matrix that the other rank does not have."""
    run = Run(1, 2, 1, fields=(("precision", "bf16" if clip else "fp16"),))
    more = {} if clip else {"loss_scale": onefold.LossScale(initial=8.0)}
    model, optimizer = built(run, onefold.mesh(shard=1, tp=2), on_nonfinite="skip", **more)
    turn(run, model, optimizer, 0, 0)
    assert optimizer.stepped
    bad = float("inf") if dist.get_rank() == 1 else 1.0
    model.blocks[0].mlp.up.weight.register_hook(lambda grad: grad * bad)
    optimizer.backward(model(*tokens(0, 0, 0)))
    if clip:
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return optimizer.stepped, optimizer.loss_scale


@pytest.mark.parametrize("clip", [False, True])
def test_a_part_that_overflows_on_one_rank_is_skipped_by_all(clip: bool) -> None:
    (first, scale), (second, other) = run_ranks(2, overflow_on_one_rank, clip)
    assert not first and not second and scale == other


def bytes_moved(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    model, optimizer = built(Run(2, 2, stage), onefold.mesh(shard=2, tp=2))
    for step in range(3):
        model(*tokens(step, 0, 0)).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    report = onefold.traffic(model)
    return report.by_purpose, report.planned


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_zero_sends_of_a_split_model_is_as_planned_to_the_byte(stage: int) -> None:
    for sent, planned in run_ranks(4, bytes_moved, stage):
        assert sent == planned
