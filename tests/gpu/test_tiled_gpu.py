"""tiled_cross_entropy() on one GPU: the loss of whole logits, less memory, and a host that does not wait."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onefold
from onefold.activations.tiled_loss_cuda import losses_and_gradient

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


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_has_the_losses_and_gradients_of_fp32_logits(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(1)
    logits = (4 * torch.randn(300, vocabulary, device="cuda")).to(dtype)
    logits[3, : vocabulary // 2] = -torch.inf  # masked
    targets = torch.randint(vocabulary // 2, vocabulary, (300,), device="cuda")
    targets[::7] = -100
    wide = (logits.double() * 0.5).requires_grad_()
    wanted = F.cross_entropy(wide, targets, reduction="none")
    gradient = torch.autograd.grad(wanted.sum() * 0.25, wide)[0] * 0.5
    losses, factor = torch.empty(300, device="cuda"), torch.full((), 0.25, device="cuda")
    for asked in (False, True):
        before = logits.clone()
        losses_and_gradient(logits, targets, losses, factor, scale=0.5, ignore_index=-100, gradient=asked)
        torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
        assert asked or torch.equal(logits, before)
    torch.testing.assert_close(logits.double(), gradient, rtol=2.0**-7, atol=1e-6)


def test_targets_with_strides_are_read_and_those_that_no_head_has_give_nan() -> None:
    hidden, weight, targets = given(torch.bfloat16)
    strided = torch.stack([targets, torch.zeros_like(targets)], 1)[:, 0]
    wanted = onefold.tiled_cross_entropy(hidden, weight, targets)
    assert torch.equal(onefold.tiled_cross_entropy(hidden, weight, strided), wanted)
    for bad in (-1, VOCABULARY):
        assert onefold.tiled_cross_entropy(hidden, weight, torch.where(targets == targets[1], bad, targets)).isnan()
