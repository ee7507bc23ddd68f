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

from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onefold.cost.layout import ALIGN as BLOCK

SIGN, SIZE, INFINITE, NAN, NORMAL = -(1 << 31), 0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x00800000
MANTISSA = 3  # bits of an 8-bit code
DROPPED = 23 - MANTISSA  # bits of an fp32 mantissa that a code lacks
NEAREST_8, NEAREST_16 = 1 << (DROPPED - 1), 1 << 15  # in place of random bits: rounds half away from zero
WORD = 1 << 32


class Keys(NamedTuple):
    """What random bits depend on beside an element's index: two numbers of 32 bits."""

    first: int
    second: int


def keys_of(seed: int, name: str, step: int) -> Keys:
    """The keys of one parameter in one step."""
    digest = sha256(f"{seed}/{step}/{name}".encode()).digest()
    return Keys(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))


def random_bits(keys: Keys, start: int, numel: int, device: torch.device) -> Tensor:
    """32 random bits for each of the elements from `start` on, as int32."""
    index = torch.arange(start, start + numel, device=device)
    bits = _wrapped(index * 0x9E3779B1 + keys.first)  # int64: wraps as 32 bits do, once cut to them
    bits ^= (bits >> 16) & 0xFFFF
    bits = bits * _signed(0x21F0AAAD) ^ _signed(keys.second)
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0x735A2D97)
    return bits ^ ((bits >> 15) & 0x1FFFF)


def bits_for_bf16(bits: Tensor, *, second: bool) -> Tensor:
    """Of an element's random bits those that round its first or its second moment to bf16."""
    return (bits >> 16 if second else bits) & 0xFFFF


def bits_for_8(bits: Tensor, *, second: bool) -> Tensor:
    """Of an element's random bits those that round its first or its second moment to 8 bits."""
    return (bits >> 12 if second else bits) & 0xFFFFF


def to_bf16(values: Tensor, random: Tensor | int = NEAREST_16) -> Tensor:
    """fp32 values in bf16; `random` has 16 bits for each. Finite values stay finite."""
    bits = values.view(torch.int32)
    size = bits & SIZE
    finite = size < INFINITE
    size = torch.where(finite, (size + random).clamp(max=INFINITE - 1), size.clamp(max=NAN))
    size = torch.where(size > INFINITE, NAN, size)
    return ((size | (bits & SIGN)) >> 16).to(torch.int16).view(torch.bfloat16)


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


def _signed(word: int) -> int:
    return word - WORD if word >= WORD >> 1 else word


def _wrapped(numbers: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers, as int32."""
    return numbers.to(torch.int32)
