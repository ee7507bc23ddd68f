"""Muon's arithmetic on one GPU: a matrix gets the bits of torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onefold.optim.newton_schulz import Muon

pytestmark = pytest.mark.gpu


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
