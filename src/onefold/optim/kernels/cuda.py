"""The fused update kernel for CUDA: gradient, master, 16-bit parameters and moments are read and written once.

For Adam, AdamW and SGD where 16 bits compute. The kernel scales the 16-bit gradient (loss scale and clipping together),
decays, updates in fp32, and writes the master and the 16-bit parameters; an fp32 master and a split one run the same
arithmetic, so their bits agree. A flag on the device makes it write nothing, so that the host need not wait for the
device to know whether gradients are finite. Other classes and settings are updated by torch's own class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onefold.optim.kernels.rule import Rule, knows

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA
    triton = None

ADAM, SGD = 0, 1
BLOCK = 1024


def fits(cls: type[torch.optim.Optimizer], group: dict[str, Any], device: torch.device) -> bool:
    """Whether the kernel supports this class with these settings on this device."""
    return triton is not None and device.type == "cuda" and knows(cls, group)


def update(
    rule: Rule,
    grad: Tensor,
    copy: Tensor,
    master: Tensor,
    factor: float | Tensor,
    bad: Tensor | None = None,
    *,
    edits: bool = False,
) -> None:
    """Updates some elements by a rule. `copy` are the 16-bit parameters; `master` is fp32, or int16 remainders of a
    bf16 `copy`. Nothing is written if `bad` is set. With `edits` an element of `copy` to which its fp32 master does not
    round was written by a user, and replaces the master first."""
    numel, split = grad.numel(), master.dtype is torch.int16
    factor = factor if isinstance(factor, Tensor) else constant(factor, grad.device)
    bad = constant(0.0, grad.device) if bad is None else bad
    first = grad if rule.first is None else rule.first  # a moment that the rule lacks is not read
    second = first if rule.second is None else rule.second
    bits = copy.view(torch.int16) if split else copy
    _kernel[(triton.cdiv(numel, BLOCK),)](
        grad, bits, master, first, second, factor, bad, numel, rule.shrink, rule.decay, rule.size, rule.root,
        rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, KIND=ADAM if rule.adam else SGD,
        VARIANT=rule.decoupled or rule.nesterov, SPLIT=split, MOMENTUM=rule.beta1 != 0.0, DECAY=rule.decay != 0.0,
        BF16=copy.dtype is torch.bfloat16, EDITS=edits, BLOCK=BLOCK,
        enable_fp_fusion=False,  # else each variant fuses its own way
    )  # fmt: skip


@lru_cache(maxsize=16)
def constant(value: float, device: torch.device) -> Tensor:
    """A number on the device, copied there once: each copy makes the host wait."""
    return torch.full((), value, dtype=torch.float32, device=device)


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        grad_ptr, copy_ptr, master_ptr, first_ptr, second_ptr, factor_ptr, bad_ptr, numel, shrink, decay, size, root,
        beta1, rest1, beta2, rest2, eps, KIND: tl.constexpr, VARIANT: tl.constexpr, SPLIT: tl.constexpr,
        MOMENTUM: tl.constexpr, DECAY: tl.constexpr, BF16: tl.constexpr, EDITS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        keep = inside & (tl.load(bad_ptr) == 0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_ptr)
        if SPLIT:
            upper = tl.load(copy_ptr + at, mask=inside, other=0).to(tl.int32)
            lower = tl.load(master_ptr + at, mask=inside, other=0).to(tl.int32)
            value = ((upper << 16) + lower).to(tl.float32, bitcast=True)
            alone = (upper << 16).to(tl.float32, bitcast=True)
            value = tl.where(value == value, value, alone)  # a copy set to 0 by hand: its remainder means nothing
        else:
            value = tl.load(master_ptr + at, mask=inside, other=0.0)
            if EDITS:
                seen = tl.load(copy_ptr + at, mask=inside, other=0.0)
                if BF16:
                    own = ((value.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)
                    own = tl.where(value == value, own, 0x7FC0)
                else:
                    own = value.to(tl.float16).to(tl.int16, bitcast=True)
                value = tl.where(own == seen.to(tl.int16, bitcast=True), value, seen.to(tl.float32))
        if KIND == 0:  # Adam
            if VARIANT:  # AdamW: the decay is apart from the moments
                value *= shrink
            elif DECAY:
                grad += value * decay
            first = tl.load(first_ptr + at, mask=inside, other=0.0)
            second = tl.load(second_ptr + at, mask=inside, other=0.0)
            first = first * beta1 + grad * rest1
            second = second * beta2 + grad * grad * rest2
            value -= size * (first / (tl.sqrt(second) / root + eps))
            tl.store(first_ptr + at, first, mask=keep)
            tl.store(second_ptr + at, second, mask=keep)
        else:  # SGD
            if DECAY:
                grad += value * decay
            if MOMENTUM:
                first = tl.load(first_ptr + at, mask=inside, other=0.0) * beta1 + grad
                tl.store(first_ptr + at, first, mask=keep)
                if VARIANT:  # nesterov
                    grad += first * beta1
                else:
                    grad = first
            value -= size * grad
        bits = value.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        lower = bits - (upper << 16)
        lost = value != value
        upper = tl.where(lost, 0x7FC0, upper)
        if SPLIT:
            tl.store(copy_ptr + at, upper.to(tl.int16), mask=keep)
            tl.store(master_ptr + at, tl.where(lost, 0, lower).to(tl.int16), mask=keep)
        else:
            tl.store(master_ptr + at, value, mask=keep)
            if BF16:
                tl.store(copy_ptr + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=keep)
            else:
                tl.store(copy_ptr + at, value.to(tl.float16), mask=keep)
