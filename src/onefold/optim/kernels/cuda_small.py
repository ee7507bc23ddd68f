"""The fused update kernel for CUDA with moments in a small form: the arithmetic and bits of small.py, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from onefold.optim.kernels.codec import BLOCK
from onefold.optim.kernels.cuda import constant
from onefold.optim.kernels.small import SmallStep

try:
    import triton
    import triton.language as tl

    from onefold.state.rounding_cuda import random_bits
except ImportError:  # a build of torch without CUDA
    triton = None

ROWS = 16  # blocks of elements that one program takes
SPLIT, WIDE_BF16, WIDE_FP16, OWN = range(4)  # masters: cpu.c has the same


def available(device: torch.device) -> bool:
    return triton is not None and device.type == "cuda"


def update(
    small: SmallStep,
    grad: Tensor,
    copy: Tensor | None,
    master: Tensor,
    factor: float | Tensor,
    bad: Tensor | None = None,
    *,
    edits: bool = False,
) -> None:
    """Updates some elements by a rule, as `update` in cuda.py; `copy` is None where fp32 parameters are their own
    master. The first element is the first of a block."""
    numel, rule = grad.numel(), small.rule
    factor = factor if isinstance(factor, Tensor) else constant(factor, grad.device)
    bad = constant(0.0, grad.device) if bad is None else bad
    first, second = small.moments[0], small.moments[-1]
    wide = WIDE_FP16 if copy is not None and copy.dtype is torch.float16 else WIDE_BF16
    kind = OWN if copy is None else SPLIT if master.dtype is torch.int16 else wide
    in_8bit = first.scales is not None
    codes = [moment.codes if in_8bit else moment.codes.view(torch.int16) for moment in (first, second)]
    scales = [moment.scales if moment.scales is not None else moment.codes for moment in (first, second)]
    keys = [key - (1 << 32) if key >> 31 else key for key in (*small.keys, small.start % (1 << 32))]
    decay = 0.0 if rule.decoupled else rule.decay
    _kernel[(triton.cdiv(numel, ROWS * BLOCK),)](
        grad, master if copy is None else copy.view(torch.int16), master, *codes, *scales, factor, bad, numel, *keys,
        rule.shrink, decay, rule.size, 1 / rule.root, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps,
        ADAM=rule.adam, NESTEROV=rule.nesterov, DECAY=decay != 0.0, MASTER=kind, EDITS=edits, IN_8BIT=in_8bit,
        ROWS=ROWS, BLOCK=BLOCK, enable_fp_fusion=False,  # each operation is rounded by itself
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _widened(ptr, scale_ptr, at, block, inside, full, SECOND: tl.constexpr, IN_8BIT: tl.constexpr):  # type: ignore[no-untyped-def]
        if IN_8BIT:
            code = tl.load(ptr + at, mask=inside, other=0).to(tl.int32)
            scale = tl.load(scale_ptr + block, mask=full, other=0).to(tl.int32)
            if SECOND:
                bits = tl.where(code > 0, ((code - 1) << 20) + ((scale - 31) << 23), 0)
            else:
                size = code & 0x7F
                bits = tl.where(size > 0, ((size - 1) << 20) + ((scale - 15) << 23), 0) | ((code & 0x80) << 24)
        else:
            bits = tl.load(ptr + at, mask=inside, other=0).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)

    @triton.jit
    def _round(ptr, scale_ptr, at, block, keep, keep_scale, value, random, SECOND: tl.constexpr, IN_8BIT: tl.constexpr):  # type: ignore[no-untyped-def]
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        if IN_8BIT:
            low: tl.constexpr = 31 if SECOND else 15
            given = ((random >> 12 if SECOND else random) & 0xFFFFF).to(tl.int32)
            size = tl.where(size > 0x7F800000, 0x7FC00000, tl.where(size < 0x00800000, 0, size))
            scale = (tl.max(size, axis=1, keep_dims=True) + 0x1FFFFF) >> 23
            scale = tl.minimum(tl.maximum(scale, low + 1), 255)
            least = (scale - low) << 23
            above = size - least
            above = tl.where(size < 0x7F800000, tl.minimum(above + given, 0x7F7FFFFF - least), above)
            shift = tl.minimum(tl.maximum((least >> 23) - (size >> 23) + 3, 0), 31)
            below = size > 0
            if not SECOND:
                below = below & ((((size & 0x7FFFFF) | 0x800000) >> shift) > given)
            code = tl.where(size >= least, (above >> 20) + 1, below.to(tl.int32))
            if not SECOND:
                code = code | ((bits >> 24) & 0x80)
            tl.store(ptr + at, code.to(tl.uint8), mask=keep)
            tl.store(scale_ptr + block, scale.to(tl.uint8), mask=keep_scale)
        else:
            given = (random >> 16 if SECOND else random & 0xFFFF).to(tl.int32)
            finite = tl.minimum(size + given, 0x7F7FFFFF)
            size = tl.where(size < 0x7F800000, finite, tl.where(size == 0x7F800000, size, 0x7FC00000))
            tl.store(ptr + at, ((size | (bits & -0x80000000)) >> 16).to(tl.int16), mask=keep)

    @triton.jit(do_not_specialize=["key0", "key1", "start"])  # numbers that differ in every call
    def _kernel(  # type: ignore[no-untyped-def]
        grad_ptr, copy_ptr, master_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, factor_ptr, bad_ptr,
        numel, key0, key1, start, shrink, decay, size, root, beta1, rest1, beta2, rest2, eps,
        ADAM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, MASTER: tl.constexpr, EDITS: tl.constexpr,
        IN_8BIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside, full = at < numel, block * BLOCK < numel
        good = tl.full((ROWS, 1), 0.0, tl.float32) + tl.load(bad_ptr) == 0.0
        keep, keep_scale = inside & good, full & good
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_ptr)
        if MASTER == 0:  # split
            upper = tl.load(copy_ptr + at, mask=inside, other=0).to(tl.int32)
            lower = tl.load(master_ptr + at, mask=inside, other=0).to(tl.int32)
            value = ((upper << 16) + lower).to(tl.float32, bitcast=True)
            alone = (upper << 16).to(tl.float32, bitcast=True)
            value = tl.where(value == value, value, alone)  # a copy set to 0 by hand: its remainder means nothing
        else:
            value = tl.load(master_ptr + at, mask=inside, other=0.0)
            if EDITS and MASTER != 3:
                seen = tl.load(copy_ptr + at, mask=inside, other=0)
                if MASTER == 1:
                    own = ((value.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)
                    own = tl.where(value == value, own, 0x7FC0)
                    theirs = seen.to(tl.bfloat16, bitcast=True).to(tl.float32)
                else:
                    own = value.to(tl.float16).to(tl.int16, bitcast=True)
                    theirs = seen.to(tl.float16, bitcast=True).to(tl.float32)
                value = tl.where(own == seen, value, theirs)
        if DECAY:
            grad = grad + value * decay
        first = _widened(first_ptr, first_scale_ptr, at, block, inside, full, False, IN_8BIT)
        random = random_bits(at + start, key0, key1)
        if ADAM:
            second = _widened(second_ptr, second_scale_ptr, at, block, inside, full, True, IN_8BIT)
            first = first * beta1 + grad * rest1
            second = second * beta2 + grad * grad * rest2
            value = value * shrink - tl.div_rn(first * size, tl.sqrt_rn(second) * root + eps)
            _round(second_ptr, second_scale_ptr, at, block, keep, keep_scale, second, random, True, IN_8BIT)
        else:
            first = first * beta1 + grad
            if NESTEROV:
                value = value - (grad + first * beta1) * size
            else:
                value = value - first * size
        _round(first_ptr, first_scale_ptr, at, block, keep, keep_scale, first, random, False, IN_8BIT)
        bits = value.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        lower = bits - (upper << 16)
        lost = value != value
        upper = tl.where(lost, 0x7FC0, upper)
        if MASTER == 0:
            tl.store(copy_ptr + at, upper.to(tl.int16), mask=keep)
            tl.store(master_ptr + at, tl.where(lost, 0, lower).to(tl.int16), mask=keep)
        else:
            tl.store(master_ptr + at, value, mask=keep)
            if MASTER == 1:
                tl.store(copy_ptr + at, upper.to(tl.int16), mask=keep)
            if MASTER == 2:
                tl.store(copy_ptr + at, value.to(tl.float16).to(tl.int16, bitcast=True), mask=keep)
