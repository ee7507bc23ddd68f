"""Digests of what tensors hold, computed where they are: equal bits have equal digests, and other bits have others, but
for a chance of 2**-64.

A digest is a sum of all elements' bits, each multiplied by a number of its place; chunks of a tensor follow each
other as the digits of a number. All of it is arithmetic modulo 2**64, so every device gives the same digest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements at a time: their products are 8 bytes each
BASE = 0x5851F42D4C957F2D  # of the digits that chunks are; odd
STIR = (0x2127599BF4325C37, 0x369DEA0F31A53F85)  # odd
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@torch.no_grad()
def digests(vectors: Iterable[Tensor]) -> Tensor:
    """A digest of each 1-D tensor, all on one device, as an int64 tensor there."""
    given = [torch.view_as_real(one).reshape(-1) if one.is_complex() else one for one in vectors]
    if not given:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    places = _places(min(CHUNK, max(vector.numel() for vector in given)), given[0].device)
    return torch.stack([_digest(vector, places) for vector in given])


def _digest(vector: Tensor, places: Tensor) -> Tensor:
    bits = vector.view(BITS[vector.itemsize])
    digest = torch.zeros((), dtype=torch.int64, device=vector.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)  # no copy if it is that already
        digest.mul_(BASE).add_(chunk.mul(places[: chunk.numel()]).sum())
    return digest


def _places(numel: int, device: torch.device) -> Tensor:
    """A number for each place of a chunk, which looks random; odd, so that no change of one element is lost."""
    numbers = torch.arange(1, numel + 1, device=device)
    for factor in STIR:
        numbers.mul_(factor).bitwise_xor_(numbers >> 29)
    return numbers.bitwise_or_(1)
