"""One GPU: a profile names kernels after where they were launched, and shows copies that no kernel hides.

Also runs as python -m tests.gpu.test_profile_gpu.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.cost.shapes import Shape
from onefold.observe.profiling.breakdown import Part
from onefold.observe.profiling.report import ProfileReport
from onefold.train.run.model import GPT
from tests.harness import run_ranks, shutdown_pools
from tests.models import Repeating

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=4, hidden=2048, heads=16, seq=256, vocab=256)
WIDTH, LAYERS = 4096, 8


def reported(model: nn.Module, batch: Tensor, *, clip: bool = False, **fields: object) -> ProfileReport:
    model = onefold.shard(model.cuda(), **fields)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, step_in_backward=not clip)
    with onefold.profile(model, steps=3, warmup=3) as found:
        while not found.done:
            with found.step():
                out = model(batch, batch) if isinstance(model, GPT) else model(batch)
                out.float().square().mean().backward()
                if clip:
                    adam.clip_grad_norm(1.0)
                adam.step()
                adam.zero_grad()
    assert found.report.device == "cuda"
    for step in found.report.steps:
        assert sum(step.parts_ns.values()) == step.wall_ns
    return found.report


def tokens(rows: int) -> Tensor:
    return torch.randint(0, SHAPE.vocab, (rows, SHAPE.seq), device="cuda")


def compute_and_idle(rows: int) -> ProfileReport:
    torch.cuda.set_device(0)
    onefold.init()
    return reported(GPT(SHAPE), tokens(rows), clip=True, stage=2, precision="bf16")


def share(report: ProfileReport, *parts: Part) -> float:
    return sum(map(report.part_s, parts)) / report.step_s


def test_kernels_fill_a_step_with_much_to_compute_and_a_small_one_leaves_the_device_idle() -> None:
    (large,), (small,) = (run_ranks(1, compute_and_idle, rows, timeout_s=120) for rows in (256, 1))
    print(large, small, sep="\n")
    assert share(large, Part.FORWARD, Part.BACKWARD) > 0.7
    assert large.part_s(Part.BACKWARD) > large.part_s(Part.FORWARD) > large.part_s(Part.UPDATE) > 0
    assert share(small, Part.IDLE) > 0.3
    assert large.exposed_s == small.exposed_s == 0


def offloaded() -> list[ProfileReport]:
    torch.cuda.set_device(0)
    onefold.init()
    away = {"stage": 3, "precision": "bf16", "offload": onefold.Offload(optimizer="host", parameters="host")}
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    few, many = torch.randn(1, WIDTH).bfloat16().cuda(), torch.randn(1 << 16, WIDTH).bfloat16().cuda()
    return [
        reported(layers, few, units=nn.Linear, **away),
        reported(Repeating(WIDTH, 20), many, units=nn.Linear, **away),
    ]


def test_copies_are_exposed_where_there_is_little_to_compute_and_hidden_where_there_is_much() -> None:
    ((moving, computing),) = run_ranks(1, offloaded, timeout_s=200)
    print(moving, computing, sep="\n")
    assert share(moving, Part.HOST) > 0.5
    assert share(computing, Part.HOST) < 0.2
    assert all(step.beside_ns > 0 for step in moving.steps)


def shared() -> ProfileReport:
    torch.cuda.set_device(0)
    torch.manual_seed(dist.get_rank())
    return reported(GPT(SHAPE), tokens(2), clip=True, stage=3, mesh=onefold.mesh(shard=-1, device="cuda"))


def test_ranks_that_share_a_gpu_show_what_they_wait_for() -> None:
    for report in run_ranks(2, shared, timeout_s=120):
        print(report)
        assert report.part_s(Part.GATHER) > 0 and report.part_s(Part.REDUCE) > 0
        assert any("gather-forward" in times for times in report.units_s().values())


if __name__ == "__main__":
    for test in (
        test_kernels_fill_a_step_with_much_to_compute_and_a_small_one_leaves_the_device_idle,
        test_copies_are_exposed_where_there_is_little_to_compute_and_hidden_where_there_is_much,
        test_ranks_that_share_a_gpu_show_what_they_wait_for,
    ):
        test()
        print(f"{test.__name__}: passed")
    shutdown_pools()
