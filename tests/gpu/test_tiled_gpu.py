"""tiled_cross_entropy() on one GPU: the loss of whole logits, less memory, and a host that does not wait."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onefold

pytestmark = pytest.mark.gpu
TOKENS, WIDTH, VOCABULARY = 4096, 256, 8192
SCALE = 2.0**17  # a loss scale, beyond what fp16 holds
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=dtype).mul_(WIDTH**-0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    return hidden, weight, torch.where(targets % 5 == 0, -100, targets)


@pytest.mark.parametrize("dtype", CLOSE)
def test_loss_and_gradients_are_those_of_whole_logits_and_the_host_never_waits(dtype: torch.dtype) -> None:
    hidden, weight, targets = given(dtype)
    whole = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    wanted = torch.autograd.grad(whole * SCALE, [hidden, weight])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = onefold.tiled_cross_entropy(hidden, weight, targets, tokens=500)
        found = torch.autograd.grad(loss * SCALE, [hidden, weight])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=0)
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other.float()).norm() <= CLOSE[dtype] * other.float().norm()


def test_memory_is_that_of_a_tile_and_of_the_gradients() -> None:
    hidden, weight, targets = given(torch.bfloat16)
    onefold.tiled_cross_entropy(hidden, weight, targets, tokens=256).backward()
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    onefold.tiled_cross_entropy(hidden, weight, targets, tokens=256).backward()
    tile, gradients = 256 * VOCABULARY * (4 + 2 + 2), hidden.numel() * 2 + weight.numel() * (4 + 2 + 2)
    assert torch.cuda.max_memory_allocated() - before < 1.3 * (tile + gradients)  # whole logits: 16 tiles
