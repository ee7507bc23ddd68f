"""Messages of whole tensors overlap with updates and with backward, in one order on all ranks; an error ends them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.comm.spans import SpanName, read
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import MODELS
from tests.models.interrupted import FailingBackward
from tests.parity.training import batch_for, same_bits
from tests.parity.whole import LAMB

CASE = MODELS["gpt"]


def trace(**fields: Any) -> list[SpanName]:
    """On a rank: Onefold's spans of one step with Muon, in the order in which they begin."""
    torch.manual_seed(0)
    in_backward = fields.pop("step_in_backward", False)
    model = onefold.shard(CASE.build(), **fields)
    optimizer = onefold.Muon(model, ns_dtype="fp32", step_in_backward=in_backward)
    for step in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            CASE.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
            optimizer.step()
        optimizer.zero_grad()
    spans = sorted((event.time_range.start, read(event.name)) for event in found.events() if read(event.name))
    return [name for _, name in spans if name]


def traces() -> dict[str, list[SpanName]]:
    onefold.init()
    return {
        "pipelined": trace(stage=3),
        "one by one": trace(stage=3, bucket_bytes=1),
        "gathered": trace(stage=2, bucket_bytes=64 << 10),
        "in backward": trace(stage=3, bucket_bytes=24 << 10, step_in_backward=True),
    }


def at(spans: list[SpanName], verb: str, what: str, of: str = "") -> list[int]:
    """Where spans of this kind are; of whole tensors' messages, those of rounds that end with `of`."""
    return [i for i, one in enumerate(spans) if one.verb == verb and one.what == what and one.of.endswith(of)]


def test_messages_travel_while_tensors_are_updated_and_while_backward_runs() -> None:
    for found in run_ranks(2, traces):
        spans = found["pipelined"]
        updates = at(spans, "update", "step")
        assert at(spans, "start", "whole-gradient", "round 1")[0] < updates[0]  # the next tensors are on their way
        assert at(spans, "wait", "whole-direction", "round 0")[0] > updates[1]  # and those before, back

        spans = found["one by one"]
        assert at(spans, "start", "whole-gradient", "round 1")[0] > at(spans, "wait", "whole-direction", "round 0")[0]

        spans = found["gathered"]  # parameters that AdamW alone updates, and units whose tensors are all updated
        assert at(spans, "start", "gather-updated")[0] < at(spans, "start", "whole-direction")[0]

        spans = found["in backward"]
        first, *_ = at(spans, "start", "whole-gradient", "round 0")
        update = next(i for i in at(spans, "update", "step") if i > first)
        assert any(first < i < update for i in at(spans, "start", "reduce")), "backward went on in between"


class Fails(LAMB):
    """Raises in the update of a tensor while `broken`."""

    broken = False

    def direction(self, *args: Any) -> Any:
        if Fails.broken:
            raise ZeroDivisionError("this class fails")
        return super().direction(*args)


def after_an_error(folder: str, master: str | None) -> list[str]:
    """On a rank: what differs from a run without an error, after one that every rank had and a load mended."""
    onefold.init()
    ended, held = [], []
    for fails in (False, True):
        torch.manual_seed(0)
        precision = onefold.Precision(compute="bf16", master=master) if master else "fp32"
        model = onefold.shard(CASE.build(), stage=3, precision=precision)
        optimizer = onefold.Optimizer(model, Fails)
        if fails:
            onefold.save(folder, model, optimizer)
            CASE.loss(model, batch_for(0, 0, dist.get_rank()), 0).backward()
            Fails.broken = True
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            Fails.broken = False
            onefold.load(folder, model, optimizer)
        for step in range(2):
            CASE.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        pool = engine_of(model).pool
        held.append(len(pool.buffers()))
        ended.append(onefold.full_state_dict(model))
    assert held[1] <= held[0], "what a failed update had borrowed is not lost"
    return [name for name, value in ended[0].items() if not same_bits(value, ended[1][name])]


@pytest.mark.parametrize("master", [None, "fp32", "split"])
def test_after_a_failed_update_no_round_is_left(tmp_path, master: str | None) -> None:
    assert run_ranks(2, after_an_error, str(tmp_path / "run"), master) == [[], []]


SHRINK = 0.75  # 1 - lr * weight_decay


class FailingMove(TorchDispatchMode):
    """The first operation with which a piece of a matrix moves along its direction finds no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor and args[0].ndim == 1 and float(args[1]) == SHRINK:
            raise MemoryError("no memory on purpose")
        return func(*args, **(kwargs or {}))


def after_a_failed_move(folder: str, master: str | None, matrices: int) -> list[str]:
    """On a rank: what is wrong after a step whose first move failed on every rank, and after a load."""
    onefold.init()
    torch.manual_seed(0)
    precision = onefold.Precision(compute="bf16", master=master) if master else "fp32"
    model = onefold.shard(nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(matrices)]), stage=3,
                          precision=precision)  # fmt: skip
    optimizer = onefold.Muon(model, place={"*": "muon"}, lr=0.5, weight_decay=0.5, ns_steps=1)

    def step() -> None:
        model(torch.ones(4, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    onefold.save(folder, model, optimizer)
    step()
    held, twice = len(engine_of(model).pool.buffers()), onefold.full_state_dict(model)
    onefold.load(folder, model, optimizer)
    with FailingMove(), pytest.raises(MemoryError, match="on purpose"):
        step()
    found = ["the model is not marked"] if engine_of(model).broken is None else []
    onefold.load(folder, model, optimizer)
    step()
    if len(engine_of(model).pool.buffers()) > held:
        found.append("what the failed update had borrowed is lost")
    return found + [name for name, value in onefold.full_state_dict(model).items() if not same_bits(value, twice[name])]


@pytest.mark.parametrize(("master", "matrices"), [(None, 2), ("fp32", 3), ("split", 3), ("split", 1)])
def test_after_a_failed_move_the_model_is_marked_and_no_memory_is_lost(tmp_path, master, matrices) -> None:
    """With one or two matrices some of three ranks own none."""
    assert run_ranks(3, after_a_failed_move, str(tmp_path / "run"), master, matrices) == [[]] * 3


def interrupted(stage: int) -> list[Tensor]:
    """On a rank: losses of evaluations between backward and step(), and parameters; one backward fails half-way."""
    torch.manual_seed(0)
    model = onefold.shard(CASE.build(), stage=stage, bucket_bytes=24 << 10)
    optimizer, found = onefold.Muon(model, ns_dtype="fp32", step_in_backward=True), []
    for step in range(3):
        batch = batch_for(step, 0, dist.get_rank())
        if step == 1:
            hook = model.layers[0].register_forward_pre_hook(
                lambda _, args: (FailingBackward.apply(args[0]), *args[1:])
            )
            with pytest.raises(ArithmeticError, match="on purpose"):
                CASE.loss(model, batch, step).backward()
            hook.remove()
        else:
            CASE.loss(model, batch, step).backward()
        with torch.no_grad():  # reads what backward has updated
            found.append(CASE.loss(model, batch_for(9, 0, dist.get_rank()), 9))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *onefold.full_state_dict(model).values()]


def scheduled(stage: int, make: Callable[..., Any]) -> list[Tensor]:
    """On a rank: parameters after steps whose settings change between backward and step()."""
    torch.manual_seed(0)
    model = onefold.shard(CASE.build(), stage=stage, bucket_bytes=24 << 10)
    optimizer = make(model, step_in_backward=True)
    for step in range(3):
        CASE.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    return list(onefold.full_state_dict(model).values())


def muon_with_tensors_of_rates(model: nn.Module, **fields: Any) -> onefold.Muon:
    rates = torch.tensor(1e-2), torch.tensor(1e-3)
    return onefold.Muon(model, lr=rates[0], adamw={"lr": rates[1], "fused": False}, **fields)


def differing_stages() -> list[str]:
    """On a rank: the stages whose parameters are not those of stage 0."""
    onefold.init()
    found = []
    for make in (onefold.Muon, muon_with_tensors_of_rates, partial(onefold.Optimizer, cls=LAMB)):
        wanted = scheduled(0, make)
        for stage in (1, 2, 3):
            if not all(map(same_bits, scheduled(stage, make), wanted)):
                found.append(f"{make}, stage {stage}")
    return found


def test_updates_in_backward_take_the_settings_that_backward_found() -> None:
    assert run_ranks(2, differing_stages) == [[], []]


def compared() -> list[int]:
    """On a rank: what differs between stages."""
    onefold.init()
    whole, sharded = interrupted(0), interrupted(3)
    return [i for i, (a, b) in enumerate(zip(whole, sharded, strict=True)) if not same_bits(a, b)]


def test_an_evaluation_and_a_failed_backward_find_every_update_ended() -> None:
    assert run_ranks(2, compared) == [[], []]
