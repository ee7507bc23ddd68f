"""States in host memory and on disk while a GPU trains: near the run without, overlapped, and where memory says.

Also runs as python -m tests.gpu.test_offload_gpu.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch

import onefold
from onefold.cost.shapes import Shape
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks, shutdown_pools
from tests.models.trainer_gpt import initialised_gpt, next_tokens, relative_distance

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=6, hidden=256, heads=4, seq=64, vocab=512)
STEPS = 6
TIERS = [
    {"optimizer": "host"},
    {"optimizer": "disk"},
    {"optimizer": "host", "parameters": "host"},
    {"optimizer": "disk", "parameters": "disk"},
]


def trained(offload: Any, *, stage: int = 3, precision: Any = "bf16", clip: bool = True, inside: bool = False) -> Any:
    torch.cuda.set_device(0)
    onefold.init()
    model = onefold.shard(
        initialised_gpt(SHAPE).cuda(), stage=stage, precision=precision, offload=offload, bucket_bytes=1 << 18
    )
    scale = onefold.LossScale(initial=256.0) if precision == "fp16" else None  # else the first steps are all skipped
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, step_in_backward=inside, loss_scale=scale)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        tokens = torch.randint(0, SHAPE.vocab, (4, SHAPE.seq), generator=generator).cuda()
        loss = model(*next_tokens(tokens))
        adam.backward(loss)
        if clip:
            adam.clip_grad_norm(1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, onefold.full_state_dict(model), model, adam


def test_a_forward_between_backward_and_step_sees_the_parameters_before_the_step() -> None:
    """The device is busy for a second when step() begins, so that an update that did not wait for it would be seen."""
    run_ranks(1, _forward_before_step)


def _forward_before_step() -> None:
    *_, model, adam = trained(onefold.Offload(optimizer="host"), clip=False)
    tokens = torch.randint(0, SHAPE.vocab, (4, SHAPE.seq), generator=torch.Generator().manual_seed(7)).cuda()
    busy = torch.zeros(8192, 8192, device="cuda")
    for _ in range(3):
        with torch.no_grad():
            wanted = model(*next_tokens(tokens)).item()
        adam.backward(model(*next_tokens(tokens)))
        for _ in range(60):
            busy = busy @ busy
        with torch.no_grad():
            found = model(*next_tokens(tokens))
        adam.step()
        adam.zero_grad()
        assert found.item() == wanted
    assert model(*next_tokens(tokens)).item() < wanted


def distance(tiers: dict[str, str], **how: Any) -> float:
    """How far parameters are from the run whose updates the device makes, of how far they have moved."""
    with tempfile.TemporaryDirectory() as folder:
        path = folder if "disk" in tiers.values() else None
        here, mine, *_ = trained(None, **how)
        there, other, *_ = trained(onefold.Offload(**tiers, path=path), **how)  # type: ignore[arg-type]
    assert torch.allclose(torch.tensor(here), torch.tensor(there), rtol=2e-3), (here, there)
    return relative_distance(mine, other, initialised_gpt(SHAPE).state_dict()) if mine else 0.0


@pytest.mark.parametrize("tiers", TIERS, ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"clip": False, "inside": True}, {"precision": "fp16"}, {"precision": "fp32"}], ids=str
)
def test_updates_of_the_host_are_near_those_of_the_device(tiers: dict[str, str], how: dict[str, Any]) -> None:
    """Both compute in fp32, in another order of a few operations. A few parameters then round to other 16 bits."""
    (found,) = run_ranks(1, distance, tiers, **how, timeout_s=120)
    assert found < 0.02, found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_that_share_a_gpu_are_near_too(stage: int) -> None:
    assert max(run_ranks(2, distance, {"optimizer": "host"}, stage=stage, timeout_s=120)) < 0.02


def bytes_on_the_device(offload: Any) -> tuple[int, int]:
    gc.collect()  # models of other tests
    before = torch.cuda.memory_allocated()
    *_, model, _ = trained(offload, clip=False, inside=True)
    engine_of(model).updates.wait()
    torch.cuda.synchronize()
    elements = sum(unit.layout.used_numel for unit in engine_of(model).units)
    return torch.cuda.memory_allocated() - before, elements


def test_the_device_holds_no_optimizer_state() -> None:
    """Values, and a few buffers; with those on the host too, the buffers."""
    torch.cuda.empty_cache()
    ((whole, elements),) = run_ranks(1, bytes_on_the_device, onefold.Offload(optimizer="host"))
    ((bare, _),) = run_ranks(1, bytes_on_the_device, onefold.Offload(optimizer="host", parameters="host"))
    assert whole < 2 * elements + (24 << 20), "cuBLAS keeps some megabytes"
    assert bare < whole - 1.5 * elements


def busy_at_once() -> bool:
    """In a trace of a step, some copy runs while some kernel does, on another stream."""
    *_, model, adam = trained(onefold.Offload(optimizer="host"), clip=False, inside=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            tokens = torch.randint(0, SHAPE.vocab, (4, SHAPE.seq)).cuda()
            model(*next_tokens(tokens)).backward()
            adam.step()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, "Memcpy" in e.name) for e in trace.events()]
    copies = [(a, b) for a, b, copy in spans if copy]
    kernels = [(a, b) for a, b, copy in spans if not copy]
    return any(a < d and c < b for a, b in copies for c, d in kernels)


def test_copies_run_beside_kernels() -> None:
    assert run_ranks(1, busy_at_once) == [True]


if __name__ == "__main__":
    try:
        for tiers in TIERS:
            for how in ({}, {"clip": False, "inside": True}, {"precision": "fp16"}, {"precision": "fp32"}):
                print(tiers, how, run_ranks(1, distance, tiers, **how, timeout_s=120))
        for stage in (1, 2, 3):
            print("two ranks, stage", stage, run_ranks(2, distance, {"optimizer": "host"}, stage=stage, timeout_s=120))
        test_the_device_holds_no_optimizer_state()
        test_copies_run_beside_kernels()
    finally:
        shutdown_pools()
