"""rounding.py's and random_rounding.py's arithmetic for CUDA: one kernel for each function, with the same bits.

Written in torch's operations they would be a dozen kernels over 131,072 elements each, or temporaries as large as the
vector and larger.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA
    triton = None

BLOCK = 2048
WORD = 1 << 32


def fits(*vectors: Tensor) -> bool:
    """Whether the kernels can take these vectors."""
    if triton is None or any(isinstance(vector, FakeTensor) for vector in vectors):
        return False
    return all(vector.is_cuda and vector.is_contiguous() for vector in vectors)


def narrow(wide: Tensor, out: Tensor) -> None:
    """fp32 to bf16, as `narrow` in rounding.py."""
    _split[_programs(wide)](wide, out.view(torch.int16), out, wide.numel(), REMAINDER=False, BLOCK=BLOCK)


def split(wide: Tensor, copy: Tensor, remainder: Tensor) -> None:
    """As `split` in rounding.py."""
    _split[_programs(wide)](wide, copy.view(torch.int16), remainder, wide.numel(), REMAINDER=True, BLOCK=BLOCK)


def join(copy: Tensor, remainder: Tensor, out: Tensor) -> None:
    """As `join` in rounding.py."""
    _join[_programs(out)](copy.view(torch.int16), remainder, out.view(torch.int32), out.numel(), BLOCK=BLOCK)


def add_rounded(total: Tensor, plus: Tensor, keys: tuple[int, int], start: int) -> None:
    """As `add_rounded` in random_rounding.py."""
    numbers = [number - WORD if number >> 31 else number for number in (*keys, start % WORD)]
    _add_rounded[_programs(total)](total, total.view(torch.int16), plus, total.numel(), *numbers, BLOCK=BLOCK)


def _programs(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)


if triton is not None:

    @triton.jit
    def mixed(bits):  # type: ignore[no-untyped-def]
        bits ^= bits >> 15
        bits = (bits * 0x735A2D97).to(tl.uint32)
        return bits ^ (bits >> 15)

    @triton.jit
    def random_bits(index, key0, key1):  # type: ignore[no-untyped-def]
        """The random bits of elements, of two keys that are given as signed numbers."""
        bits = (index.to(tl.uint32) * 0x9E3779B1).to(tl.uint32) + key0.to(tl.uint32, bitcast=True)
        bits ^= bits >> 16
        bits = (bits * 0x21F0AAAD).to(tl.uint32) ^ key1.to(tl.uint32, bitcast=True)
        return mixed(bits)

    @triton.jit
    def _split(wide_ptr, copy_ptr, remainder_ptr, numel, REMAINDER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        value = tl.load(wide_ptr + at, mask=inside, other=0.0)
        rounded = value.to(tl.uint32, bitcast=True) + 0x8000
        lost = value != value
        tl.store(copy_ptr + at, tl.where(lost, 0x7FC0, rounded >> 16).to(tl.int16), mask=inside)
        if REMAINDER:
            tl.store(remainder_ptr + at, tl.where(lost, 0, (rounded & 0xFFFF) ^ 0x8000).to(tl.int16), mask=inside)

    @triton.jit
    def _join(copy_ptr, remainder_ptr, out_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        upper = tl.load(copy_ptr + at, mask=inside, other=0).to(tl.int32) << 16
        joined = upper + tl.load(remainder_ptr + at, mask=inside, other=0).to(tl.int32)
        lost = ((joined & 0x7FFFFFFF) > 0x7F800000) & ((upper & 0x7FFFFFFF) <= 0x7F800000)
        tl.store(out_ptr + at, tl.where(lost, upper, joined), mask=inside)

    @triton.jit(do_not_specialize=["key0", "key1", "start"])  # numbers that differ in every call
    def _add_rounded(total_ptr, bits_ptr, plus_ptr, numel, key0, key1, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        value = tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(plus_ptr + at, mask=inside, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        drawn = random_bits(at.to(tl.uint32) + start.to(tl.uint32, bitcast=True), key0, key1)
        random = (mixed(drawn ^ bits.to(tl.uint32, bitcast=True)) & 0xFFFF).to(tl.int32)
        size = bits & 0x7FFFFFFF
        finite = tl.minimum(size + random, 0x7F7FFFFF)
        size = tl.where(size < 0x7F800000, finite, tl.where(size == 0x7F800000, size, 0x7FC00000))
        tl.store(bits_ptr + at, ((size | (bits & -0x80000000)) >> 16).to(tl.int16), mask=inside)
