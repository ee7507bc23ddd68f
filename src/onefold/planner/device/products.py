"""Matrix products of linear layers by shape and dtype: that of forward and the two of backward, each in its layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from onefold.planner.device.clock import Clock

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FEW = ((4096, 16384), (1024, 2048, 4096, 8192))  # tokens and widths for dtypes that are seldom trained with
GPU = ((1024, 4096, 8192, 16384, 65536), (512, 1024, 1600, 2048, 2560, 3072, 4096, 5120, 8192))
CPU = ((32, 128, 256, 1024), (128, 256, 512, 1024))
HEADS = ((2048, 8192, 16384), (1024, 2048, 4096, 8192), (32768, 50304, 128256, 151936))
CPU_HEADS = ((32, 256, 1024), (256, 512, 1024), (256, 8192, 50304))
UNEVEN = 50257  # columns of GPT-2's head, which no vector width divides


def shapes(clock: Clock, name: str) -> Iterator[tuple[int, int, int]]:
    """Tokens, inputs and outputs: the four matrices of a GPT's block, and output layers."""
    if clock.quick:
        yield from ((64, 64, 192), (64, 256, 64), (64, 64, 1024))
        return
    usual = name == ("bf16" if clock.cuda else "fp32")
    grid = (GPU if clock.cuda else CPU) if usual else FEW
    for tokens in grid[0]:
        for width in grid[1]:
            for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
                yield tokens, inputs, outputs
    sizes: list[tuple[int, ...]] = [one if usual else one[1:2] for one in (HEADS if clock.cuda else CPU_HEADS)]
    rows, widths, columns = sizes
    for tokens in rows:
        for width in widths:
            yield from ((tokens, width, outputs) for outputs in columns)
            if usual and width < 8192:
                yield tokens, width, UNEVEN


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def products(clock: Clock) -> dict[str, list[list[float]]]:
    """By dtype rows of tokens, inputs, outputs, and seconds of forward, of the input's gradient and of the weight's."""
    names = list(DTYPES) if clock.cuda else ["fp32"]  # few CPUs have units for 16 bits
    found: dict[str, list[list[float]]] = {}
    for name in names:
        with _tf32(name == "tf32"):
            rows = [_row(clock, DTYPES[name], *shape) for shape in shapes(clock, name)]
        found[name] = [row for row in rows if row]
    return found


def _row(clock: Clock, dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> list[float]:
    if not clock.fits((tokens * inputs + inputs * outputs + tokens * outputs) * 2 * dtype.itemsize):
        return []
    x = torch.randn(tokens, inputs, device=clock.device).to(dtype)
    weight = torch.randn(outputs, inputs, device=clock.device).to(dtype)
    grad = torch.randn(tokens, outputs, device=clock.device).to(dtype)
    bias = torch.zeros(outputs, device=clock.device, dtype=dtype)
    runs = (lambda: F.linear(x, weight, bias), lambda: grad @ weight, lambda: grad.t() @ x)
    return [tokens, inputs, outputs, *(clock.seconds(run) for run in runs)]
