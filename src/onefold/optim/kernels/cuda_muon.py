"""What Muon does beside matrix products, in three kernels for CUDA, with the bits of torch's operations.

Before Newton-Schulz: the gradient as it was reduced, its factor, the momentum, Nesterov's average and the rounding to
bf16, over 12 bytes per element of a gradient in 16 bits; in torch five kernels over 44 bytes. Then the division by the
norm: torch's kernel for a divisor that is a tensor computes an address for each element. After Newton-Schulz: weight
decay and the update, over 10 bytes; in torch two kernels over 18, one of which reads the direction of a tall matrix,
which is transposed, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA
    triton = None

BLOCK, TILE = 2048, 64
WIDE, NARROW = (torch.float32,), (torch.bfloat16, torch.float16)
Factor = float | Tensor


def takes_gradient(grad: Tensor, factor: Factor, settings: Mapping[str, Any]) -> bool:
    """Whether `move_momentum` takes a gradient as it was reduced, in fp32 or in 16 bits, and a factor for it. torch's
    lerp computes in another way where a weight is on the other side of a half."""
    known = settings["ns_dtype"] == "bf16" and 0.5 < settings["momentum"] < 1.0
    alone = isinstance(factor, int | float) or (factor.is_cuda and factor.ndim == 0 and factor.dtype is torch.float32)
    return known and alone and _is_vector(grad, WIDE + NARROW)


def _is_vector(tensor: Tensor, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a tensor is one that kernels here read and write."""
    if triton is None or isinstance(tensor, FakeTensor):
        return False
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype in dtypes and tensor.numel() > 0


def takes_momentum(average: Tensor) -> bool:
    """Whether `move_momentum` takes this momentum."""
    return _is_vector(average, WIDE)


def move_momentum(grad: Tensor, factor: Factor, average: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Moves the momentum towards the scaled gradient, and gives what is made orthogonal, in bf16."""
    out = torch.empty_like(grad, dtype=torch.bfloat16)
    momentum, numel = settings["momentum"], grad.numel()
    _average[(triton.cdiv(numel, BLOCK),)](
        grad, average, out, factor, numel, 1 - momentum, _rest_in_fp32(momentum), NESTEROV=settings["nesterov"],
        SCALED=isinstance(factor, Tensor) or factor != 1.0, ON_DEVICE=isinstance(factor, Tensor), BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def divides(x: Tensor, by: Tensor) -> bool:
    """Whether `divide` can divide a matrix by a number on the device."""
    return _is_vector(x if x.is_contiguous() else x.mT, (torch.bfloat16,)) and by.numel() == 1 and by.dtype is x.dtype


def divide(x: Tensor, by: Tensor) -> None:
    """x = x / by"""
    _divide[(triton.cdiv(x.numel(), BLOCK),)](x, by, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False)


def adds(param: Tensor, direction: Tensor) -> bool:
    """Whether `add` can add this direction: in the memory order of the parameter, or a matrix that is transposed."""
    if direction.dtype is not torch.bfloat16 or not _is_vector(param, WIDE):
        return False
    if direction.ndim == 1:
        return direction.is_contiguous() and direction.numel() % TILE == 0
    return direction.is_contiguous() or _is_transposed(direction)


def add(param: Tensor, direction: Tensor, shrink: float, alpha: float) -> None:
    """param = param * shrink + alpha * direction"""
    direction = direction.view(-1, TILE) if direction.ndim == 1 else direction
    columns = direction.shape[-1]
    rows = direction.numel() // columns
    _add[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
        param, direction, rows, columns, shrink, alpha, TRANSPOSED=not direction.is_contiguous(), TILE=TILE,
        enable_fp_fusion=False,
    )  # fmt: skip


def _is_transposed(direction: Tensor) -> bool:
    return direction.ndim == 2 and direction.mT.is_contiguous()


@lru_cache(maxsize=16)
def _rest_in_fp32(momentum: float) -> float:
    """1 - momentum, subtracted in fp32, as lerp does where the weight is at least a half."""
    return float(torch.tensor(1.0) - torch.tensor(momentum, dtype=torch.float32))


if triton is not None:

    @triton.jit(do_not_specialize=["factor"])  # a number that may change in every step
    def _average(  # type: ignore[no-untyped-def]
        grad_ptr, average_ptr, out_ptr, factor, numel, weight, rest, NESTEROV: tl.constexpr, SCALED: tl.constexpr,
        ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            grad = grad * (tl.load(factor) if ON_DEVICE else factor)
        average = tl.load(average_ptr + at, mask=inside, other=0.0)
        average = tl.fma(grad - average, weight, average)
        tl.store(average_ptr + at, average, mask=inside)
        if NESTEROV:
            average = tl.fma(grad - average, rest, average)
        tl.store(out_ptr + at, average.to(tl.bfloat16), mask=inside)

    @triton.jit
    def _divide(x_ptr, by_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        by = tl.zeros([BLOCK], tl.float32) + tl.load(by_ptr).to(tl.float32)
        tl.store(x_ptr + at, tl.div_rn(x, by).to(tl.bfloat16), mask=inside)

    @triton.jit(do_not_specialize=["shrink", "alpha"])  # numbers that a schedule changes in every step
    def _add(  # type: ignore[no-untyped-def]
        param_ptr, direction_ptr, rows, columns, shrink, alpha, TRANSPOSED: tl.constexpr, TILE: tl.constexpr
    ):  # fmt: skip
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
        at = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        if TRANSPOSED:
            across, both = column[:, None] * rows + row[None, :], (column < columns)[:, None] & (row < rows)[None, :]
            direction = tl.trans(tl.load(direction_ptr + across, mask=both, other=0.0))
        else:
            direction = tl.load(direction_ptr + at, mask=inside, other=0.0)
        param = tl.load(param_ptr + at, mask=inside, other=0.0) * shrink
        tl.store(param_ptr + at, tl.fma(direction.to(tl.float32), alpha, param), mask=inside)
