"""Rounding fp32 to 16 bits, and splitting fp32 into a bf16 copy and a 16-bit remainder, from which it joins exactly.

bf16 is the upper half of an fp32, so an fp32 master equals its bf16 copy and a signed 16-bit *remainder*:

    bits of the master = (bits of the copy << 16) + remainder

The copy is rounded half away from zero: then the remainder always fits. (Rounded half to even, a tie that rounds down
leaves +32768, one too many.) Adding 0x8000 to the fp32 bits does the rounding; the upper half of the sum is the copy,
and the lower half with its top bit flipped is the remainder. NaNs would carry into the sign, so their copy is the
canonical NaN and their remainder 0. fp16 has another exponent: there torch rounds, and no remainder exists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.state import rounding_cuda

HALF = 0x8000
CHUNK = 1 << 17  # elements at a time, so that the sum stays in cache and needs no buffer as long as the vector


def narrow(wide: Tensor, out: Tensor) -> None:
    """out = wide, rounded: to bf16 half away from zero, to other dtypes as torch rounds. Both are 1-D."""
    if isinstance(out, FakeTensor):  # a rehearsal, on tensors without memory
        return
    if out.dtype is not torch.bfloat16 or wide.dtype is not torch.float32:
        out.copy_(wide)
        return
    if rounding_cuda.fits(wide, out):
        rounding_cuda.narrow(wide, out)
        return
    copy = out.view(torch.int16)
    for chunk, halves in _rounded(wide):
        copy[chunk].copy_(halves[:, 1])
    if wide.is_cuda or _has_nan(wide):
        out.masked_fill_(torch.isnan(wide), float("nan"))


def not_rounded_from(wide: Tensor, copy: Tensor) -> Tensor:
    """Which elements of a 16-bit vector are not the rounded ones of an fp32 vector."""
    rounded = torch.empty_like(copy)
    narrow(wide, rounded)
    return rounded.view(torch.int16) != copy.view(torch.int16)


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor of any shape in another dtype, rounded as `narrow` does; a dense tensor keeps its strides."""
    out = torch.empty_like(tensor, dtype=dtype)
    source = tensor if tensor.stride() == out.stride() else torch.empty_like(out, dtype=tensor.dtype).copy_(tensor)
    narrow(_flat(source), _flat(out))
    return out


def split(wide: Tensor, copy: Tensor, remainder: Tensor) -> None:
    """Writes an fp32 vector as its bf16 copy and signed 16-bit remainder; `join` undoes it."""
    if isinstance(copy, FakeTensor):
        return
    if rounding_cuda.fits(wide, copy, remainder):
        rounding_cuda.split(wide, copy, remainder)
        return
    upper = copy.view(torch.int16)
    for chunk, halves in _rounded(wide):
        upper[chunk].copy_(halves[:, 1])
        torch.bitwise_xor(halves[:, 0], -HALF, out=remainder[chunk])
    if wide.is_cuda or _has_nan(wide):
        lost = torch.isnan(wide)
        copy.masked_fill_(lost, float("nan"))
        remainder.masked_fill_(lost, 0)


def join(copy: Tensor, remainder: Tensor, out: Tensor) -> None:
    """out = the fp32 vector that `split` made `copy` and `remainder` of. Where a user has set the copy since, its
    remainder means nothing: where the sum is a NaN but the copy is not, the result is the copy."""
    if isinstance(copy, FakeTensor):
        return
    if rounding_cuda.fits(copy, remainder, out):
        rounding_cuda.join(copy, remainder, out)
        return
    upper, bits = copy.view(torch.int16), out.view(torch.int32)
    for start in range(0, out.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        halves = bits[chunk].view(torch.int16).view(-1, 2)
        halves[:, 1].copy_(upper[chunk])
        halves[:, 0].copy_(remainder[chunk])
        bits[chunk].bitwise_xor_(HALF).sub_(HALF)
    if out.is_cuda or _has_nan(out):
        torch.where(torch.isnan(out) & ~torch.isnan(copy), copy.float(), out, out=out)


def _rounded(wide: Tensor):  # type: ignore[no-untyped-def]
    """For each chunk of the fp32 bits, rounded to bf16: its slice, and its 16-bit halves (column 0 lower, 1 upper)."""
    bits = wide.view(torch.int32)
    scratch = torch.empty(min(CHUNK, wide.numel()), dtype=torch.int32, device=wide.device)
    for start in range(0, wide.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        part = bits[chunk]
        rounded = torch.add(part, HALF, out=scratch[: part.numel()])
        yield chunk, rounded.view(torch.int16).view(-1, 2)


def _has_nan(wide: Tensor) -> bool:
    """Whether there may be a NaN: infinities of both signs give True too. Not for CUDA, where it would wait."""
    return bool(torch.isnan(wide.sum()))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
