"""Inputs and buffers of a 16-bit model: what is cast, what is left alone, and averages of its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.models import PositionTable
from tests.users.runs import STAGES, built, masters, net, train

TOKENS, BF16, FP32 = 10, torch.bfloat16, torch.float32


def run(stage: int, cast: Any) -> tuple[list[tuple[torch.dtype, float]], Tensor]:
    onefold.init()
    torch.manual_seed(0)
    precision = onefold.Precision(compute="bf16", cast_inputs=cast)
    model = onefold.shard(PositionTable(TOKENS, 5), stage=stage, precision=precision, bucket_bytes=1 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        output = model(torch.arange(5), torch.tensor(1.0), time=torch.tensor(999.0))
        assert output.dtype is BF16
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.seen[:2], output.detach()


CASES: list[tuple[Any, list[tuple[torch.dtype, float]]]] = [
    (True, [(BF16, 1.0), (BF16, 1000.0)]),  # 999 is no bf16 number
    (("scale",), [(BF16, 1.0), (FP32, 999.0)]),
    ((1,), [(BF16, 1.0), (FP32, 999.0)]),
    (("x", "time"), [(FP32, 1.0), (BF16, 1000.0)]),
]


@pytest.mark.parametrize("stage", STAGES)
def test_chosen_inputs_are_cast_and_a_sum_with_an_fp32_buffer_runs(stage: int) -> None:
    for cast, wanted in CASES:
        for seen, _ in run_ranks(2, run, stage, cast):
            assert seen == wanted, cast


def test_stages_agree_bit_for_bit_with_an_fp32_buffer() -> None:
    ends = [run_ranks(2, run, stage, ("scale",))[0][1] for stage in STAGES]
    assert all(torch.equal(ends[0], end) for end in ends)


def uncast(given: torch.dtype) -> list[str]:
    """cast_inputs=False: inputs come as they are, and torch refuses an fp32 one."""
    model, _ = built(2, onefold.Precision(compute="bf16", cast_inputs=False))
    try:
        return [str(model(torch.ones(2, 16, dtype=given)).dtype)]
    except RuntimeError as error:
        return [str(error)]


def test_without_casts_inputs_come_as_they_are() -> None:
    assert run_ranks(2, uncast, BF16) == [["torch.bfloat16"]] * 2
    for [said] in run_ranks(2, uncast, FP32):
        assert "dtype" in said


def named(cast: Any) -> None:
    built(2, onefold.Precision(compute="bf16", cast_inputs=cast))


@pytest.mark.parametrize(
    ("cast", "wanted"),
    [
        (("timestep",), "cast_inputs='timestep' is no input of forward(x)"),
        ((3,), "cast_inputs=3 is no input of forward(x)"),
        (("x", -1), "is neither True, False nor a tuple"),
        ("x", "is neither True, False nor a tuple"),
    ],
)
def test_an_input_that_is_not_there_raises(cast: Any, wanted: str) -> None:
    for error in run_ranks_raises(2, named, cast):
        assert error.type_name == "ConfigError" and wanted in error.message


def averaged(stage: int, ema: bool) -> bool:
    """torch's average, made of the model before shard(): fp32, of the 16-bit parameters it sees."""
    onefold.init()
    plain = net()
    average = AveragedModel(plain, avg_fn=get_ema_avg_fn(0.5) if ema else None)
    model = onefold.shard(plain, stage=stage, precision="bf16", bucket_bytes=2 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    seen = []
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        seen.append(model.head.weight.detach().float().clone())
        average.update_parameters(model)
    want = (seen[0] / 2 + seen[1] / 2) / 2 + seen[2] / 2 if ema else sum(seen) / 3
    assert masters(model)["head.weight"].shape == want.shape
    return bool(torch.allclose(average.module.head.weight, want, atol=1e-6))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averaged_model_follows_a_16_bit_model(stage: int) -> None:
    for ema in (False, True):
        assert run_ranks(2, averaged, stage, ema) == [True, True]


def cast_by_name_and_compiled() -> tuple[str, int, int]:
    """A layer called by keyword casts too, and the casts of equal blocks that are compiled share one graph."""
    torch.compiler.reset()
    model, _ = built(2)
    by_name = str(model.head(input=torch.ones(2, 16)).dtype)
    graphs, runs = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *args: (runs.append(1), graph.forward(*args))[1]

    for block in model.layers:
        block.compile(backend=backend)
    model(torch.ones(2, 16)).float().sum().backward()
    return by_name, len(graphs), len(runs)


def test_casts_work_by_keyword_and_break_no_graph() -> None:
    assert run_ranks(2, cast_by_name_and_compiled) == [("torch.bfloat16", 1, 3)] * 2
