"""overlap_param_gather: updated parameters of stages 1 and 2 arrive while the next forward runs, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold import ConfigError, StateError
from tests.harness import run_ranks
from tests.models import Counting
from tests.parity.stage3.compare import Case, batch, differences, learn
from tests.parity.stage3.test_loops import TURNS

OVERLAP: dict[str, Any] = {"overlap_param_gather": True}


def all_turns(stage: int, precision: str) -> list[str]:
    found = []
    for name, turn in TURNS.items():
        case = Case(Counting, turn, {"precision": precision})
        found += [f"{name}: {line}" for line in differences(case, stage, OVERLAP)]
    return found


@pytest.mark.parametrize(
    ("stage", "precision", "ranks"),
    [
        pytest.param(2, "fp32", 2, marks=pytest.mark.soak),
        (2, "bf16", 2),
        pytest.param(1, "bf16", 3, marks=pytest.mark.soak),
    ],
)
def test_every_training_loop_gives_the_bits_of_stage_0(stage: int, precision: str, ranks: int) -> None:
    assert run_ranks(ranks, all_turns, stage, precision) == [[]] * ranks


def build(stage: int, **fields: Any) -> tuple[nn.Module, onefold.Optimizer]:
    torch.manual_seed(3)
    inside = fields.pop("inside", False)
    model = onefold.shard(Counting(), stage=stage, bucket_bytes=1 << 12, **fields)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=inside)


def train(model: nn.Module, optimizer: onefold.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        losses.append(learn(model, step).detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    with onefold.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def updated_in_backward(precision: str) -> bool:
    plain = train(*build(2, precision=precision, inside=True), range(4))
    overlapped = train(*build(2, precision=precision, inside=True, **OVERLAP), range(4))
    return all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_in_backward_may_overlap_too(precision: str) -> None:
    assert run_ranks(2, updated_in_backward, precision) == [True, True]


def two_optimizers(**fields: Any) -> dict[str, Tensor]:
    """Each steps half of the parameters of every unit, without a forward between them; then one steps twice."""
    torch.manual_seed(3)
    model = onefold.shard(Counting(), stage=2, bucket_bytes=1 << 12, **fields)
    params = list(model.parameters())
    halves = [onefold.Optimizer(model, torch.optim.AdamW, groups=[{"params": params[i::2]}], lr=1e-2) for i in (0, 1)]
    for step in range(3):
        learn(model, step)
        for optimizer in (*halves, halves[0]):
            optimizer.step()
        for optimizer in halves:
            optimizer.zero_grad()
    return values(model)


def two_optimizers_agree() -> bool:
    plain, overlapped = two_optimizers(), two_optimizers(**OVERLAP)
    return all(torch.equal(overlapped[name], plain[name]) for name in plain)


def test_steps_without_a_forward_between_them() -> None:
    assert run_ranks(2, two_optimizers_agree) == [True, True]


def between_steps(precision: str, folder: str) -> list[str]:
    """What users do after step() and before the next forward, beside a model whose parameters are there at once."""
    plain, plainly = build(2, precision=precision)
    model, optimizer = build(2, precision=precision, **OVERLAP)
    plain_average, average = onefold.EMA(plain, 0.5), onefold.EMA(model, 0.5)
    found = []
    for number in range(4):
        train(plain, plainly, range(number, number + 1))
        train(model, optimizer, range(number, number + 1))
        plain_average.update()
        average.update()
        try:
            next(model.parameters()).sum()
            found.append("a parameter that may be on its way was read")
        except StateError as error:
            if "full_parameters" not in str(error):
                found.append(str(error))
        if number == 0:
            whole = onefold.full_state_dict(plain)
            found += [k for k, v in onefold.full_state_dict(model).items() if not torch.equal(v, whole[k])]
        if number == 1:
            onefold.save(folder, model, optimizer, step=number)
            train(model, optimizer, range(7, 9))
            onefold.load(folder, model, optimizer)
        if number == 2:
            for one in (plain, model):
                with onefold.full_parameters(one, write=True), torch.no_grad():
                    next(one.parameters()).mul_(0.5)
    with torch.no_grad(), plain_average.applied(), average.applied():
        if not torch.equal(plain(batch(5)), model(batch(5))):
            found.append("the average")
    ours, theirs = values(model), values(plain)
    return found + [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_users_do_between_steps_finds_updated_parameters(precision: str, tmp_path: Path) -> None:
    assert run_ranks(2, between_steps, precision, str(tmp_path / precision)) == [[], []]


def reported() -> tuple[onefold.MemoryReport, onefold.TrafficReport]:
    model, optimizer = build(2, **OVERLAP)
    train(model, optimizer, range(3))
    return onefold.memory(model), onefold.traffic(model)


def test_reports_and_plans_agree() -> None:
    for memory, traffic in run_ranks(2, reported):
        assert traffic.by_purpose == {k: v for k, v in traffic.planned.items() if k != "norm"}
        assert traffic.by_purpose["gather-updated"] > 0 and "gather-forward" not in traffic.by_purpose
        assert memory.parameters.measured == memory.parameters.planned


@pytest.mark.parametrize("fields", [{"stage": 0}, {"stage": 3}, {"stage": 2, "offload": "host"}])
def test_where_nothing_is_gathered_after_a_step_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="for stages 1 and 2 with the optimizer state on the device"):
        onefold.Zero(**fields, **OVERLAP)
    with pytest.raises(ConfigError, match="neither True nor False"):
        onefold.Zero(stage=2, overlap_param_gather=1)  # type: ignore[arg-type]
