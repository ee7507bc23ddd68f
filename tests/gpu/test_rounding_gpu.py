"""Rounding on one GPU: each kernel gives the bits of torch's operations on the host, for every kind of number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onefold.state.random_rounding import add_rounded, keys_of
from onefold.state.rounding import join, narrow, split
from onefold.state.rounding_cuda import BLOCK

pytestmark = pytest.mark.gpu
NUMEL = 5 * BLOCK + 7


def bits(start: int, numel: int = NUMEL) -> Tensor:
    """fp32 values of all exponents, zeros, subnormals, infinities and NaNs among them."""
    drawn = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=torch.Generator().manual_seed(start))
    special = torch.tensor([0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7F7FFFFF, 0x7FFFFFFF, 0x00007FFF, 0x00008000])
    drawn[: len(special)] = special
    drawn[len(special) : 2 * len(special)] = special - (1 << 31)
    return drawn.to(torch.int32).view(torch.float32)


def same(ours: Tensor, theirs: Tensor) -> bool:
    raw = {2: torch.int16, 4: torch.int32}[ours.itemsize]
    return torch.equal(ours.cpu().view(raw), theirs.view(raw))


def test_rounded_split_and_joined_values_have_the_bits_of_the_host() -> None:
    wide = bits(0)
    for offset in (0, 1):  # of vectors that begin inside others
        host, there = wide[offset:], wide.cuda()[offset:]
        copy, rest = torch.empty_like(host, dtype=torch.bfloat16), torch.empty_like(host, dtype=torch.int16)
        copy_there, rest_there, rounded = copy.cuda(), rest.cuda(), copy.cuda()
        split(host, copy, rest)
        split(there, copy_there, rest_there)
        narrow(there, rounded)
        assert same(copy_there, copy) and same(rest_there, rest) and same(rounded, copy)
        joined, joined_there = torch.empty_like(host), torch.empty_like(there)
        join(copy, rest, joined)
        join(copy_there, rest_there, joined_there)
        assert same(joined_there, joined)


def test_copies_that_were_set_beside_their_remainders_join_as_on_the_host() -> None:
    copy, rest = bits(3).view(torch.int16)[::2].contiguous().view(torch.bfloat16), bits(4).view(torch.int16)[::2]
    rest = rest.contiguous()
    joined, joined_there = torch.empty(NUMEL), torch.empty(NUMEL, device="cuda")
    join(copy, rest, joined)
    join(copy.cuda(), rest.cuda(), joined_there)
    plain = (copy.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    assert (plain.view(torch.float32).isnan() & ~copy.isnan()).any(), "no remainder in these bits means nothing"
    assert same(joined_there, joined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 3, (1 << 32) - 5])
def test_stochastic_sums_have_the_bits_of_the_host(dtype: torch.dtype, start: int) -> None:
    for name in ("a", "b", "c"):  # keys with and without their upper bit
        total, plus = torch.randn(NUMEL).bfloat16(), (1e-3 * torch.randn(NUMEL)).to(dtype)
        odd = 40
        total[:odd], plus[:odd] = bits(1, odd).bfloat16(), bits(2, odd).to(dtype)
        there = total.cuda()
        add_rounded(total, plus, keys_of(1, name, 7), start)
        add_rounded(there, plus.cuda(), keys_of(1, name, 7), start)
        finite = ~total.isnan()
        assert same(there[finite.cuda()], total[finite]) and torch.equal(there.isnan().cpu(), ~finite)
