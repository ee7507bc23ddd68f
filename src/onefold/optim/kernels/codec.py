"""Small forms of optimizer state, in operations of torch: bf16, and 8 bits with a scale for each block of 64 elements.

Both are rounded stochastically: up with the probability that makes the mean exact, so that changes far below the last
bit (Adam's second moment moves by a thousandth in a step) are not lost. The random bits are a function of seed, step,
parameter and the element's index in it, so every stage, number of ranks and tier rounds alike. cpu.c and cuda_small.py
compute the same bits; here is the reference, and what runs where neither can.

bf16: the upper half of the fp32 bits, after random bits were added to the lower half.
8 bits: a block's scale is the exponent of its largest element, one byte. A code is an exponent below the scale and
three bits of mantissa; code 0 is zero. First moments have a sign and 16 exponents, second moments 32. Blocks start
where a parameter starts, and every shard and param group starts on a multiple of 64: nothing ever cuts a block. What is
below the smallest code becomes zero or that code; a second moment never becomes zero, by whose root Adam divides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from onefold.cost.layout import ALIGN as BLOCK
from onefold.state.random_rounding import INFINITE, NAN, SIZE

NORMAL = 0x00800000
MANTISSA = 3  # bits of an 8-bit code
DROPPED = 23 - MANTISSA  # bits of an fp32 mantissa that a code lacks
NEAREST_8 = 1 << (DROPPED - 1)  # in place of random bits: rounds half away from zero


def bits_for_bf16(bits: Tensor, *, second: bool) -> Tensor:
    """Of an element's random bits those that round its first or its second moment to bf16."""
    return (bits >> 16 if second else bits) & 0xFFFF


def bits_for_8(bits: Tensor, *, second: bool) -> Tensor:
    """Of an element's random bits those that round its first or its second moment to 8 bits."""
    return (bits >> 12 if second else bits) & 0xFFFFF


def to_8bit(values: Tensor, random: Tensor | int = NEAREST_8, *, second: bool) -> tuple[Tensor, Tensor]:
    """fp32 values as codes, and the scales of their blocks; `random` has 20 bits for each value. The first value is the
    first of a block. A block that holds an infinity or NaN keeps it, and of its other elements nothing."""
    low = _exponents(second) - 1
    bits = values.view(torch.int32)
    size = bits & SIZE
    size = torch.where(size > INFINITE, NAN, torch.where(size < NORMAL, 0, size))
    blocks = -(-values.numel() // BLOCK)
    largest = pad(size, (0, blocks * BLOCK - values.numel())).view(blocks, BLOCK).amax(1)
    # The largest element, rounded up, has at most the largest code: 1.75 times the power of two of the scale.
    scale = ((largest + (2 << DROPPED) - 1) >> 23).clamp(low + 1, 255)
    least = _each((scale - low) << 23, values.numel())  # the value of code 1, as bits
    above = torch.where(size < INFINITE, (size - least + random).minimum(INFINITE - 1 - least), size - least)
    # Below the least code: up with the probability size / least, of which these are 20 bits.
    shift = ((least >> 23) - (size >> 23) + MANTISSA).clamp(0, 31)
    chance = ((size & (NORMAL - 1)) | NORMAL) >> shift
    up = torch.ones_like(size, dtype=torch.bool) if second else chance > random
    code = torch.where(size >= least, (above >> DROPPED) + 1, (up & (size > 0)).int())
    if not second:
        code |= (bits >> 24) & 0x80
    return code.to(torch.uint8), scale.to(torch.uint8)


def from_8bit(codes: Tensor, scales: Tensor, *, second: bool) -> Tensor:
    """The fp32 values of codes, exactly. The first code is the first of a block."""
    code = codes.int()
    size = code if second else code & 0x7F
    least = _each((scales.int() - (_exponents(second) - 1)) << 23, codes.numel())
    bits = torch.where(size > 0, ((size - 1) << DROPPED) + least, 0)
    return (bits if second else bits | ((code & 0x80) << 24)).view(torch.float32)


def _exponents(second: bool) -> int:
    return 32 if second else 16


def _each(blocks: Tensor, numel: int) -> Tensor:
    """A number of each block for each of its elements."""
    return blocks.repeat_interleave(BLOCK)[:numel]
