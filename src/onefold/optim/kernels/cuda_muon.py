"""What Muon does beside matrix products, in two kernels for CUDA, with the bits of torch's operations.

Before Newton-Schulz: the momentum, Nesterov's average and the rounding to bf16, over 14 bytes per element; in torch
three kernels over 30 bytes. After it: weight decay and the update, over 10 bytes; in torch two kernels over 18, one of
which reads the direction of a tall matrix, which is transposed, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def fits(settings: Mapping[str, Any], *tensors: Tensor) -> bool:
    """Whether `average` can be used with these settings: gradient and momentum in fp32 on a CUDA device. torch's lerp
    computes in another way where a weight is on the other side of a half."""
    known = settings["ns_dtype"] == "bf16" and 0.5 < settings["momentum"] < 1.0
    return known and all(map(_in_fp32, tensors))


def _in_fp32(tensor: Tensor) -> bool:
    """Whether a tensor is one that kernels here read and write."""
    if triton is None or isinstance(tensor, FakeTensor):
        return False
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype is torch.float32 and tensor.numel() > 0


def average(grad: Tensor, average: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Moves the momentum, and gives what is made orthogonal, in bf16."""
    out = torch.empty_like(grad, dtype=torch.bfloat16)
    momentum, numel = settings["momentum"], grad.numel()
    _average[(triton.cdiv(numel, BLOCK),)](
        grad, average, out, numel, 1 - momentum, _rest_in_fp32(momentum), NESTEROV=settings["nesterov"], BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def adds(param: Tensor, direction: Tensor) -> bool:
    """Whether `add` can add this direction: in the memory order of the parameter, or a matrix that is transposed."""
    if direction.dtype is not torch.bfloat16 or not _in_fp32(param):
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

    @triton.jit
    def _average(grad_ptr, average_ptr, out_ptr, numel, weight, rest, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
        average = tl.load(average_ptr + at, mask=inside, other=0.0)
        average = tl.fma(grad - average, weight, average)
        tl.store(average_ptr + at, average, mask=inside)
        if NESTEROV:
            average = tl.fma(grad - average, rest, average)
        tl.store(out_ptr + at, average.to(tl.bfloat16), mask=inside)

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
