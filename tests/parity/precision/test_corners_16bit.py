"""What users do at the edges of mixed precision: the same as in fp32, or an error with a name."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold import LossScale, Precision
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.models import BetweenTwoNumbers, Detached, Input, NowAndThen, TakingAny
from tests.parity.precision.test_stages_16bit import SPLIT

POLICIES: dict[str, Any] = {"fp32": "fp32", "bf16": "bf16", "split": SPLIT}
STAGES = (0, 1, 2, 3)


def started(precision: Any, stage: int = 2, lr: float = 0.1, **more: Any) -> tuple[nn.Module, onefold.Optimizer]:
    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(64, 64), stage=stage, precision=precision, timeout_s=10)
    return model, onefold.Optimizer(model, torch.optim.SGD, lr=lr, **more)


def loss_of(model: nn.Module, size: float = 1.0) -> Tensor:
    return model(torch.ones(4, 64) * size).float().square().mean()


def drop_a_bad_batch(policy: str, stage: int) -> tuple[bool, float]:
    model, sgd = started(POLICIES[policy], stage)
    loss_of(model, float("nan")).backward()
    if not sgd.clip_grad_norm(1.0).isfinite():
        sgd.zero_grad()
    loss_of(model).backward()
    sgd.clip_grad_norm(1e-3)
    sgd.zero_grad()
    before = onefold.full_state_dict(model)
    loss_of(model).backward()
    sgd.step()
    after = onefold.full_state_dict(model)
    return sgd.stepped, float((after["weight"] - before["weight"]).norm()) if after else 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_is_forgotten_with_the_gradients(policy: str) -> None:
    for stage in STAGES:
        for stepped, moved in run_ranks(2, drop_a_bad_batch, policy, stage):
            assert stepped and 0.01 < moved < 10


def clip_twice(policy: str) -> list[float]:
    model, sgd = started(POLICIES[policy])
    before = onefold.full_state_dict(model)
    loss_of(model, 100.0).backward()
    norms = [sgd.clip_grad_norm(1.0).item(), sgd.clip_grad_norm(1.0).item()]
    sgd.step()
    after = onefold.full_state_dict(model)
    return [*norms, sum(float((after[n] - before[n]).norm() ** 2) for n in after) ** 0.5 / 0.1 if after else 1.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_twice_clips_once(policy: str) -> None:
    for first, second, applied in run_ranks(2, clip_twice, policy):
        assert first > 1000 and abs(second - 1) < 1e-3 and abs(applied - 1) < 1e-2


def backward_after_clip() -> None:
    model, sgd = started("fp16", loss_scale=LossScale(initial=8.0))
    sgd.backward(loss_of(model))
    sgd.clip_grad_norm(1.0)
    sgd.backward(loss_of(model) * 1e9)


def test_a_backward_after_clipping_is_refused_in_16_bits() -> None:
    for error in run_ranks_raises(2, backward_after_clip):
        assert error.type_name == "StateError" and "after all backwards" in error.message


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "zero": lambda weight: weight.zero_(),
    "fill": lambda weight: weight.fill_(1.0),
    "infinity": lambda weight: weight[0].fill_(float("inf")),
}


def edit(policy: str, stage: int, how: str) -> tuple[list[float], list[float]]:
    """The masters after an edit in place, and after a step of nothing."""
    model, sgd = started(POLICIES[policy], stage, lr=0.0)
    with torch.no_grad():
        EDITS[how](model.weight)
    states = [onefold.full_state_dict(model)]
    (model(torch.ones(4, 64)).float() * 0).nan_to_num().sum().backward()
    sgd.step()
    states.append(onefold.full_state_dict(model))
    return tuple([float(s["weight"][0].abs().sum())] if s else [] for s in states)  # type: ignore[return-value]


@pytest.mark.parametrize(("stage", "how"), thinned([0, 1, 2], EDITS))
def test_an_edit_in_place_reaches_the_master(stage: int, how: str) -> None:
    wanted = {"zero": 0.0, "fill": 64.0, "infinity": float("inf")}[how]
    for policy in POLICIES:
        assert run_ranks(2, edit, policy, stage, how)[0] == ([wanted], [wanted])


def zero_data() -> bool:
    model, sgd = started(SPLIT, 1)
    model.weight.data.zero_()
    loss_of(model).backward()
    sgd.step()
    return bool(torch.isfinite(model.weight).all())


def test_zeroed_data_with_a_split_master_is_no_nan() -> None:
    assert run_ranks(2, zero_data) == [True, True]


def share_a_loss(precisions: tuple[str, str]) -> float:
    torch.manual_seed(0)
    first = onefold.shard(nn.Linear(64, 16), precision=precisions[0])
    second = onefold.shard(nn.Linear(16, 4), precision=precisions[1])
    sgds = [onefold.Optimizer(model, torch.optim.SGD, lr=0.1) for model in (first, second)]
    for _ in range(2):
        sgds[1].backward(second(first(torch.ones(4, 64))).float().square().mean())
        for sgd in sgds:
            sgd.step()
            sgd.zero_grad()
    return float(first.weight.float().abs().sum())


def test_models_that_share_a_loss_share_its_scale() -> None:
    plain = run_ranks(2, share_a_loss, ("fp32", "fp32"))[0]
    for precisions in (("fp32", "fp16"), ("fp16", "fp16")):
        assert abs(run_ranks(2, share_a_loss, precisions)[0] - plain) < 1e-2 * plain


def load_inside(policy: str, stage: int) -> bool:
    model, _ = started(POLICIES[policy], stage)
    torch.manual_seed(5)
    source = nn.Linear(64, 64).state_dict()
    with onefold.full_parameters(model, write=True):
        model.load_state_dict(source)
    state = onefold.full_state_dict(model)
    return all(torch.equal(state[name], source[name]) for name in state)


@pytest.mark.parametrize("policy", ["bf16", "split"])
def test_a_state_loaded_inside_full_parameters_is_not_rounded(policy: str) -> None:
    for stage in STAGES:
        assert run_ranks(2, load_inside, policy, stage) == [True, True]


def once_after_a_backward(stage: int, policy: str) -> Tensor | None:
    model, sgd = started(POLICIES[policy], stage, lr=1.0)

    def backward(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(8, 64, generator=generator)).float().square().mean().backward()

    backward(0)
    with onefold.accumulate(model, reduce="once"):
        backward(1)
    backward(2)
    sgd.step()
    return onefold.full_state_dict(model).get("weight")


@pytest.mark.parametrize("policy", POLICIES)
def test_accumulating_once_after_a_backward_gives_the_same_bits_at_every_stage(policy: str) -> None:
    first = run_ranks(2, once_after_a_backward, 0, policy)[0]
    for stage in STAGES[1:]:
        assert torch.equal(run_ranks(2, once_after_a_backward, stage, policy)[0], first), f"stage {stage}"


def mixed_start(stage: int) -> float:
    model = onefold.shard(BetweenTwoNumbers(), stage=stage, precision="bf16")
    with onefold.full_parameters(model):
        return model.b[0].item()


def test_parameters_of_several_dtypes_start_from_the_same_bits() -> None:
    assert {value for stage in STAGES for value in run_ranks(2, mixed_start, stage)} == {1.0078125}


# -- updates inside backward ---------------------------------------------------------------------------------------


def inside(case: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    model = onefold.shard(Detached() if case == "detached" else layers, stage=2, bucket_bytes=1, timeout_s=10)
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=0.5, step_in_backward=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        if case == "zero_grad":
            sgd.zero_grad()
        if case == "eval":
            with torch.no_grad():
                seen = model(torch.ones(1, 32)).sum().item()
        sgd.step()
    return seen


@pytest.mark.parametrize(("case", "word"), [("detached", "modified by an inplace"), ("zero_grad", "before zero_grad")])
def test_updates_inside_backward_that_would_go_wrong_raise(case: str, word: str) -> None:
    for error in run_ranks_raises(2, inside, case):
        assert word in error.message


def test_an_evaluation_before_the_step_sees_the_same_values_on_all_ranks() -> None:
    first, second = run_ranks(2, inside, "eval")
    assert first == second


def now_and_then() -> bool:
    model = onefold.shard(nn.Sequential(NowAndThen(), NowAndThen()), stage=2, units=NowAndThen, timeout_s=10)
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, step_in_backward=True)
    for step in range(12):
        for block in model:
            block.on = step == 10
        model(torch.ones(2, 16)).square().mean().backward()
        sgd.step()
    return sgd.stepped


def test_parameters_used_now_and_then_are_updated_inside_backward() -> None:
    assert run_ranks(2, now_and_then) == [True, True]


# -- inputs, modules, schedulers -----------------------------------------------------------------------------------


def take() -> list[Any]:
    model = onefold.shard(TakingAny(8, 8), stage=2, precision="bf16")
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    log: list[str] = []
    x = torch.randn(4, 8)
    outs = [model(data, log) for data in (Input(x), {"x": x}, UserDict(x=x))]
    sum(out.float().sum() for out in outs).backward()
    sgd.step()
    return [log, [out.dtype for out in outs], model.norm.weight.dtype, model.norm.running_mean.dtype]


def test_inputs_in_any_container_are_cast_and_batch_norm_stays_fp32() -> None:
    for log, dtypes, weight, buffer in run_ranks(2, take):
        assert log == ["seen"] * 3 and dtypes == [torch.bfloat16] * 3 and weight is buffer is torch.float32


def schedulers() -> list[str]:
    _, sgd = started("fp32")
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    step = torch.optim.lr_scheduler.StepLR
    copy.copy(onefold.Scheduler(sgd, step, step_size=3)).get_last_lr()
    found = []
    for args, kwargs in (
        ((sgd, "cosine"), {}),
        ((sgd, step(sgd, 3)), {"step_size": 3}),
        ((plain, step), {"step_size": 3}),
    ):
        try:
            onefold.Scheduler(*args, **kwargs)
        except onefold.ConfigError as error:
            found.append(str(error))
    return found


def test_what_is_no_scheduler_is_refused() -> None:
    assert all(len(found) == 3 for found in run_ranks(2, schedulers))


def buffers(stage: int, precision: Any, reduce: str | None) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    model = onefold.shard(model, stage=stage, precision=precision, bucket_bytes=1)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        if reduce:
            with onefold.accumulate(model, reduce=reduce):
                loss_of(model).backward()
        loss_of(model).backward()
        adam.step()
        adam.zero_grad()
    report = onefold.memory(model).communication
    return report.measured, report.planned or 0


@pytest.mark.parametrize(("reduce", "ranks"), thinned([None, "once", "each"], [1, 2]))
def test_communication_buffers_keep_to_the_plan(reduce: str | None, ranks: int) -> None:
    for precision in (
        "fp32",
        "bf16",
        SPLIT,
        Precision(compute="bf16", wire="fp32"),
        Precision(compute="bf16", grad="fp32"),
    ):
        for stage in STAGES:
            for measured, planned in run_ranks(ranks, buffers, stage, precision, reduce):
                assert measured <= planned, (stage, str(precision))
