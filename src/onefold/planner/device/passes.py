"""What a block computes beside matrix products: attention, norms, the nonlinearity, sums; and the loss of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onefold.planner.device.clock import Clock

LENGTHS, WIDTHS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128)
ROWS = 1 << 18  # of attention: sequences x heads x length
SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
HIDDEN = 4096  # of the rows of norms
LOGITS = ((1024, 32768), (8192, 32768), (8192, 50304), (16384, 151936))
LARGEST = 1 << 27  # rows x length of attention that fp32 computes, which has no fused kernel everywhere


def dtypes(clock: Clock) -> dict[str, torch.dtype]:
    fp32 = {"fp32": torch.float32}
    return {"bf16": torch.bfloat16, **fp32} if clock.cuda else fp32


def _both(clock: Clock, forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> list[float]:
    """Seconds of a forward and of its backward."""
    output = forward()
    grad = torch.randn_like(output)
    back = clock.seconds(lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True))
    with torch.no_grad():
        return [clock.seconds(forward), back]


def attention(clock: Clock) -> dict[str, list[list[float]]]:
    """By dtype rows of length, width of a head, rows (sequences x heads x length), seconds of forward and backward of
    causal attention."""
    lengths = (32, 64) if clock.quick else LENGTHS if clock.cuda else (32, 128, 256, 1024)
    total = 256 if clock.quick else ROWS if clock.cuda else 1 << 12
    found: dict[str, list[list[float]]] = {}
    for name, dtype in dtypes(clock).items():
        rows = found[name] = []
        for width in WIDTHS:
            for length in lengths:
                if name == "fp32" and total * length > LARGEST * 8:
                    continue
                heads = max(1, min(16, total // length))
                shape = (max(1, total // length // heads), length, heads, width)
                if not clock.fits(16 * shape[0] * length * heads * width * dtype.itemsize):
                    continue
                q, k, v = (_leaf(clock, shape, dtype) for _ in range(3))

                def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                rows.append([length, width, shape[0] * length * heads, *_both(clock, forward, (q, k, v))])
    return found


def _leaf(clock: Clock, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=clock.device).to(dtype).requires_grad_()


def elementwise(clock: Clock) -> dict[str, dict[str, list[list[float]]]]:
    """By dtype and kind rows of elements, seconds of forward and of backward: `norm`, `gelu`, `add` (its backward adds
    two gradients), `copy`, and `sum` of all rows to one, which is the gradient of a bias."""
    sizes = (1 << 12, 1 << 14) if clock.quick else SIZES if clock.cuda else (1 << 14, 1 << 17, 1 << 20, 1 << 23)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name, dtype in dtypes(clock).items():
        kinds = found[name] = {kind: [] for kind in ("norm", "gelu", "add", "copy", "sum")}
        for numel in sizes:
            if not clock.fits(6 * numel * dtype.itemsize):
                continue
            width = min(HIDDEN, numel // 8)
            x = _leaf(clock, (numel // width, width), dtype)
            weight, bias = _leaf(clock, (width,), dtype), _leaf(clock, (width,), dtype)
            y = x.detach().clone()

            def norm(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
                return F.layer_norm(x, (weight.numel(),), weight, bias)

            def gelu(x: Tensor = x) -> Tensor:
                return F.gelu(x, approximate="tanh")

            plain = x.detach()
            kinds["norm"].append([numel, *_both(clock, norm, (x, weight, bias))])
            kinds["gelu"].append([numel, *_both(clock, gelu, (x,))])
            add = clock.seconds(lambda a=plain, b=y: a + b)  # type: ignore[misc]
            kinds["add"].append([numel, add, add])
            copy = clock.seconds(lambda a=plain, b=y: b.copy_(a))  # type: ignore[misc]
            kinds["copy"].append([numel, copy, copy])
            whole = clock.seconds(lambda a=plain: a.sum(0))  # type: ignore[misc]
            kinds["sum"].append([numel, whole, whole])
    return found


def loss(clock: Clock) -> dict[str, list[list[float]]]:
    """By dtype rows of tokens, words, and seconds of the cross entropy of logits in fp32: forward and backward."""
    found: dict[str, list[list[float]]] = {}
    sizes = ((16, 256),) if clock.quick else LOGITS if clock.cuda else ((32, 8192), (256, 8192), (256, 50304))
    for name, dtype in dtypes(clock).items():
        rows = found[name] = []
        for tokens, words in sizes:
            if not clock.fits(tokens * words * 20):
                continue
            logits = _leaf(clock, (tokens, words), dtype)
            targets = torch.randint(0, words, (tokens,), device=clock.device)

            def forward(logits: Tensor = logits, targets: Tensor = targets) -> Tensor:
                return F.cross_entropy(logits.float(), targets)

            rows.append([tokens, words, *_both(clock, forward, (logits,))])
    return found
