"""Muon on one GPU: the bits of torch.optim.Muon, also where tensors are updated beside each other on two streams."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.optim.kernels import cuda_muon
from onefold.optim.newton_schulz import Muon

pytestmark = pytest.mark.gpu
STEPS = 10
SIDES = (512, 1600, 1024, 512, 1600, 640)
LR, DECAY = 0.02, 0.1


def trained(cls: type[torch.optim.Optimizer], shape: tuple[int, ...], **settings: Any) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    param = nn.Parameter(torch.randn(shape, device="cuda", generator=generator))
    optimizer = cls([param], lr=0.02, **settings)  # type: ignore[call-arg]
    for _ in range(3):
        param.grad = torch.randn(shape, device="cuda", generator=generator)
        optimizer.step()
    return torch.stack([param.detach(), optimizer.state[param]["momentum_buffer"]])


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "weight_decay": 0.0}, {"momentum": 0.3}], ids=str)
@pytest.mark.parametrize("shape", [(512, 768), (768, 512), (100, 60), (1, 7), (4096, 64)])
def test_bits_are_those_of_torchs_class(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    assert torch.equal(trained(Muon, shape, **settings), trained(torch.optim.Muon, shape, **settings))


@pytest.mark.parametrize(
    ("shape", "matrices"),
    [
        ((96, 32), (32, 32, 32)), ((96, 32), (64, 16, 16)), ((65, 33), (33, 31, 1)), ((4, 40, 24), "stack"),
        ((4, 24, 40), "stack"), ((48, 3, 3, 3), "flat"), ((16, 32, 3, 3), "flat"), ((64, 5, 3), "flat"),
    ],
)  # fmt: skip
def test_kernels_have_the_bits_of_torchs_operations(
    shape: tuple[int, ...], matrices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_muon.triton is not None
    found = trained(Muon, shape, matrices=matrices)
    monkeypatch.setattr(cuda_muon, "triton", None)
    assert torch.equal(found, trained(Muon, shape, matrices=matrices))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(SIDES)]).cuda()


def train(model: nn.Module, optimizer: Any, clip: float | None = None) -> None:
    """Without waiting for the device: kernels of a step, and of the next forward, are queued while others run."""
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(64, SIDES[0], device="cuda", generator=generator)
        loss = model(x).square().mean()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        if clip is not None:
            optimizer.clip_grad_norm(clip)
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


def test_tensors_are_updated_on_two_streams() -> None:
    """Whether kernels of both run at once is left to the device and to how fast the host is: other processes may have
    either."""
    onefold.init()
    model = onefold.shard(layers(), stage=2)
    optimizer = onefold.Muon(model, place={"*": "muon"})
    train(model, optimizer)
    model(torch.randn(64, SIDES[0], device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = Counter(event.device_resource_id for event in trace.events() if event.device_type.name == "CUDA")
    products = 3 * 5  # of one matrix, in five iterations
    assert sum(count >= products for count in kernels.values()) >= 2, f"kernels by stream: {dict(kernels)}"
