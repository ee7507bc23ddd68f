"""Muon on one GPU: the bits of torch.optim.Muon, also where tensors are updated beside each other on two streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.optim.newton_schulz import Muon

pytestmark = pytest.mark.gpu
STEPS = 10
SIDES = (512, 1600, 1024, 512, 1600, 640)
LR, DECAY = 0.02, 0.1


def trained(cls: type[torch.optim.Optimizer], shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    param = nn.Parameter(torch.randn(shape, device="cuda", generator=generator))
    optimizer = cls([param], lr=0.02)  # type: ignore[call-arg]
    for _ in range(3):
        param.grad = torch.randn(shape, device="cuda", generator=generator)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", [(512, 768), (768, 512), (100, 60)])
def test_bits_are_those_of_torchs_class(shape: tuple[int, int]) -> None:
    assert torch.equal(trained(Muon, shape), trained(torch.optim.Muon, shape))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(SIDES)]).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Without waiting for the device: kernels of a step, and of the next forward, are queued while others run."""
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(64, SIDES[0], device="cuda", generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def torchs() -> list[Tensor]:
    model = layers()
    train(model, torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY))
    return [param.detach().clone() for param in model.parameters()]


def ours(stage: int, *, inside: bool) -> list[Tensor]:
    onefold.init()
    model = onefold.shard(layers(), stage=stage)
    everything = dict.fromkeys((name for name, _ in model.named_parameters()), "muon")
    train(model, onefold.Muon(model, lr=LR, weight_decay=DECAY, place=everything, step_in_backward=inside))
    with onefold.full_parameters(model):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_updated_beside_each_other_have_the_bits_of_torchs_class(inside: bool) -> None:
    wanted = torchs()
    for stage in (0, 1, 2, 3):
        found = ours(stage, inside=inside)
        assert all(map(torch.equal, found, wanted)), f"stage {stage}"


def test_tensors_are_updated_beside_each_other() -> None:
    onefold.init()
    model = onefold.shard(layers(), stage=2)
    optimizer = onefold.Muon(model, place={"*": "muon"})
    train(model, optimizer)
    model(torch.randn(64, SIDES[0], device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in trace.events() if event.device_type.name == "CUDA"
    )
    assert any(start < end for (_, end), (start, _) in pairwise(spans)), "no two kernels ran at once"
