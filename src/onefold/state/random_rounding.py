"""Rounding fp32 to bf16 stochastically: up with the probability that makes the mean exact, so that sums keep what is
below their last bit. The random bits are hashes, not a generator's, so every stage, number of ranks and tier rounds
alike, and so does a run that was resumed.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.state import rounding_cuda

SIGN, SIZE, INFINITE, NAN = -(1 << 31), 0x7FFFFFFF, 0x7F800000, 0x7FC00000
NEAREST_16 = 1 << 15  # in place of random bits: rounds half away from zero
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
    bits = (index * 0x9E3779B1 + keys.first).to(torch.int32)  # int64: wraps as 32 bits do, once cut to them
    bits ^= (bits >> 16) & 0xFFFF
    bits = bits * _signed(0x21F0AAAD) ^ _signed(keys.second)
    return _mixed(bits)


def to_bf16(values: Tensor, random: Tensor | int = NEAREST_16) -> Tensor:
    """fp32 values in bf16; `random` has 16 bits for each. Finite values stay finite."""
    bits = values.view(torch.int32)
    size = bits & SIZE
    finite = size < INFINITE
    size = torch.where(finite, (size + random).clamp(max=INFINITE - 1), size.clamp(max=NAN))
    size = torch.where(size > INFINITE, NAN, size)
    return ((size | (bits & SIGN)) >> 16).to(torch.int16).view(torch.bfloat16)


def add_rounded(total: Tensor, plus: Tensor, keys: Keys, start: int) -> None:
    """total += plus, of elements of one parameter from `start` on: a bf16 vector, summed in fp32 and rounded
    stochastically. The random bits depend on the sum too: a counter of all sums would have to be saved with a run."""
    if rounding_cuda.fits(total, plus):
        rounding_cuda.add_rounded(total, plus, keys, start)
        return
    wide = total.float().add_(plus)
    drawn = random_bits(keys, start, total.numel(), total.device)
    total.copy_(to_bf16(wide, _mixed(drawn ^ wide.view(torch.int32)) & 0xFFFF))


def _mixed(bits: Tensor) -> Tensor:
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0x735A2D97)
    return bits ^ ((bits >> 15) & 0x1FFFF)


def _signed(word: int) -> int:
    return word - WORD if word >= WORD >> 1 else word
