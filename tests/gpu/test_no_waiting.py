"""The host never waits for the device inside a step, so it can run ahead. Also: python -m tests.gpu.test_no_waiting."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity as Activity

import onefold
from onefold.comm.mesh import simulated_axes
from onefold.cost.shapes import Shape
from onefold.sharding import shard_over
from onefold.train.run.model import GPT, initialise
from tests.harness import run_ranks, shutdown_pools

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=4, hidden=256, heads=4, seq=64, vocab=512)
WAYS: list[dict[str, Any]] = [{}, {"clip": True}, {"inside": True}, {"activations": "checkpoint"}]
MUON: list[dict[str, Any]] = [{"optimizer": "muon", **way} for way in WAYS]
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "fused adamw": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw in 8 bits": (torch.optim.AdamW, {"state": "8bit"}),
    "momentum in bf16": (torch.optim.SGD, {"momentum": 0.9, "state": "bf16"}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "nadam": (torch.optim.NAdam, {}),
}


def waits(
    ranks: int,
    stage: int,
    clip: bool = False,
    inside: bool = False,
    optimizer: str = "adamw",
    precision: str = "bf16",
    **fields: Any,
) -> list[str]:
    """Calls that make the host wait, in one step of rank 0 of `ranks`: as torch sees them, and as CUDA does."""
    onefold.init()
    with torch.device("meta"):
        model = GPT(SHAPE)
    fields |= {"device": "cuda", "init": lambda module: initialise(module, layers=SHAPE.layers)}
    if ranks == 1:
        onefold.shard(model, stage=stage, precision=precision, **fields)
    else:
        shard_over(simulated_axes(ranks, plays="nccl"), model, onefold.Zero(stage=stage, precision=precision), fields)
    if optimizer == "muon":
        adam: onefold.Optimizer = onefold.Muon(model, lr=1e-4, step_in_backward=inside)
    else:
        cls, settings = CLASSES[optimizer]
        adam = onefold.Optimizer(model, cls, lr=1e-4, step_in_backward=inside, **settings)
    tokens = torch.randint(0, SHAPE.vocab, (4, SHAPE.seq), device="cuda")

    def step() -> None:
        adam.backward(model(tokens, tokens))
        if clip:
            adam.clip_grad_norm(1.0)
        adam.step()
        adam.zero_grad()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both = torch.profiler.profile(activities=[Activity.CPU, Activity.CUDA])
            with both as trace, torch.profiler.record_function("the step"):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (span,) = [e.time_range for e in trace.events() if e.name == "the step" and e.device_type.name == "CPU"]
    inner = [e.name for e in trace.events() if span.start <= e.time_range.start and e.time_range.end <= span.end]
    seen = [str(c.message) for c in caught if "synchroniz" in str(c.message)]
    # what the step before found is read once it has arrived: an event that the device passed before the last update
    past = 1 if clip or precision == "fp16" else 0
    return seen + [name for name in inner if "Synchronize" in name][past:]


@pytest.mark.parametrize("way", [*WAYS, *MUON], ids=str)
@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (8, 1), (8, 2), (8, 3)])
def test_the_host_never_waits_for_the_device_inside_a_step(ranks: int, stage: int, way: dict[str, Any]) -> None:
    assert run_ranks(1, waits, ranks, stage, timeout_s=120, **way) == [[]]


@pytest.mark.parametrize(("precision", "clip"), [("bf16", True), ("fp32", True), ("fp16", True), ("fp16", False)])
@pytest.mark.parametrize("optimizer", CLASSES)
def test_the_host_never_waits_to_know_whether_gradients_are_finite(optimizer: str, precision: str, clip: bool) -> None:
    way = {"clip": clip, "optimizer": optimizer, "precision": precision}
    assert run_ranks(1, waits, 8, 2, timeout_s=120, **way) == [[]]


if __name__ == "__main__":
    try:
        for ranks, stage in [(1, 3), (8, 1), (8, 2), (8, 3)]:
            for way in WAYS:
                test_the_host_never_waits_for_the_device_inside_a_step(ranks, stage, way)
                print("passed:", ranks, stage, way)
    finally:
        shutdown_pools()
