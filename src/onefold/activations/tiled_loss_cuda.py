"""The losses of a tile's tokens and the gradient of its logits, on CUDA: one kernel that reads 16-bit logits twice and
writes the gradient over them, where operations of torch would read and write fp32 logits a dozen times."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA
    triton = None

BLOCK = 4096  # logits of a token at a time


def fits(logits: Tensor) -> bool:
    """Whether the kernel can take these logits."""
    return triton is not None and logits.is_cuda and logits.itemsize == 2 and not isinstance(logits, FakeTensor)


def losses_and_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, factor: Tensor, *, scale: float, ignore_index: int, gradient: bool
) -> None:
    """Writes the loss of each token: 0 if it does not count, NaN if its target is no row of the head. With `gradient`,
    logits become the gradient of the losses' sum times `factor`. Logits are multiplied by `scale` first."""
    rows, vocabulary = logits.shape
    if rows:
        _kernel[(rows,)](
            logits,
            targets,
            losses,
            factor,
            vocabulary,
            scale,
            ignore_index,
            GRADIENT=gradient,
            BLOCK=BLOCK,
            num_warps=8,
        )


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        logits_ptr, targets_ptr, losses_ptr, factor_ptr, vocabulary, scale, ignore_index, GRADIENT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * vocabulary
        target = tl.load(targets_ptr + row)
        columns = tl.arange(0, BLOCK)
        if target == ignore_index:
            tl.store(losses_ptr + row, 0.0)
            if GRADIENT:
                for start in range(0, vocabulary, BLOCK):
                    at = start + columns
                    tl.store(logits_ptr + at, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=at < vocabulary)
        else:
            largest = tl.full((), float("-inf"), tl.float32)
            total = tl.full((), 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                at = start + columns
                value = tl.load(logits_ptr + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * scale
                found = tl.maximum(largest, tl.max(value, axis=0))
                finite = tl.where(found == float("-inf"), 0.0, found)  # of logits that are all masked so far
                total = total * tl.exp(largest - finite) + tl.sum(tl.exp(value - finite), axis=0)
                largest = found
            log_sum = largest + tl.log(total)
            known = (target >= 0) & (target < vocabulary)  # else the loss is NaN
            picked = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32) * scale
            tl.store(losses_ptr + row, log_sum - picked)
            if GRADIENT:
                tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
                factor = tl.load(factor_ptr) * scale
                for start in range(0, vocabulary, BLOCK):
                    at = start + columns
                    inside = at < vocabulary
                    value = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32) * scale
                    found = (tl.exp(value - log_sum) - tl.where(at == target, 1.0, 0.0)) * factor
                    tl.store(logits_ptr + at, found.to(logits_ptr.dtype.element_ty), mask=inside)
