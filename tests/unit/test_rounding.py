"""The compute copy and its remainder: nothing is lost, whatever the bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.state.rounding import CHUNK, join, narrow, narrowed, split

SIGN = 1 << 31
ADVERSE = [
    0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000, 0x007FFFFF,  # denormals
    0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F7FFFFF,  # ties and their neighbours near 1
    0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,  # the largest, which round to infinity or just do not
    0x7F800000,  # infinity
    0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF,  # NaNs: a carry would reach the sign
]  # fmt: skip
words = st.integers(0, (1 << 32) - 1) | st.sampled_from(ADVERSE + [bits | SIGN for bits in ADVERSE])


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >= SIGN else b for b in bits], dtype=torch.int32).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def parts(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy, rest = torch.empty(wide.numel(), dtype=torch.bfloat16), torch.empty(wide.numel(), dtype=torch.int16)
    split(wide, copy, rest)
    return copy, rest


def check(wide: torch.Tensor) -> None:
    copy, rest = parts(wide)
    back, rounded = torch.empty_like(wide), torch.empty_like(copy)
    join(copy, rest, back)
    narrow(wide, rounded)
    nan = torch.isnan(wide)
    assert torch.equal(bits_of(back)[~nan], bits_of(wide)[~nan]), "something was lost"
    assert torch.equal(bits_of(copy), bits_of(rounded)), "both masters must compute with the same bits"
    assert torch.equal(torch.isnan(copy), nan) and torch.equal(torch.isnan(back), nan)
    assert (bits_of(copy)[nan] == 0x7FC0).all(), "not the canonical NaN"
    total = (bits_of(copy).long() << 16) + rest.long()
    assert torch.equal(total.to(torch.int32)[~nan], bits_of(wide)[~nan]), "the formula of the remainder"


@given(st.lists(words, min_size=1, max_size=70))
def test_a_master_is_its_copy_and_its_remainder(bits: list[int]) -> None:
    check(floats(bits))


def test_every_adverse_value_survives() -> None:
    check(floats(ADVERSE + [bits | SIGN for bits in ADVERSE]))


def test_millions_of_random_bits_survive() -> None:
    generator = torch.Generator().manual_seed(0)
    check(torch.randint(-(1 << 31), (1 << 31) - 1, (2 * CHUNK + 77,), generator=generator).int().view(torch.float32))


@given(st.floats(-(2.0**126), 2.0**126, width=32))
def test_the_copy_is_nearest_and_ties_go_away_from_zero(value: float) -> None:
    wide = torch.tensor([value])
    copy = parts(wide)[0]
    step = bits_of(copy) + torch.tensor([-1, 1], dtype=torch.int16)
    near = step.view(torch.bfloat16).double()
    error, others = (copy.double() - wide.double()).abs(), (near - wide.double()).abs()
    assert bool((error <= others)[torch.isfinite(near)].all())
    tied = torch.isfinite(near) & (error == others)
    assert bool((copy.double().abs() >= near.abs())[tied].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_keeps_shape_and_strides(dtype: torch.dtype) -> None:
    image = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    for tensor in (image, torch.randn(5, 7).t(), torch.ones(())):
        copy = narrowed(tensor, dtype)
        assert copy.dtype is dtype and copy.shape == tensor.shape and copy.stride() == tensor.stride()
        assert torch.allclose(copy.float(), tensor, rtol=2**-8)


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(-0x8000, 0x7FFF)), min_size=1, max_size=300))
def test_a_copy_that_was_set_beside_its_remainder_never_joins_to_a_nan(halves: list[tuple[int, int]]) -> None:
    halves += [(0x7F80, 1), (0xFF80, 5), (0x7F7F, 0x7FFF), (0x8000, -1), (0, -1), (0, -0x8000)]
    upper = [copy - (1 << 16) if copy >= 1 << 15 else copy for copy, _ in halves]
    copy = torch.tensor(upper, dtype=torch.int16).view(torch.bfloat16)
    rest = torch.tensor([rest for _, rest in halves], dtype=torch.int16)
    joined = torch.empty(len(halves))
    join(copy, rest, joined)
    plain = floats([((bits << 16) + remainder) % (1 << 32) for (bits, _), remainder in zip(halves, rest.tolist())])
    lost = plain.isnan() & ~copy.isnan()
    assert lost.any() and torch.equal(joined[lost], copy[lost].float())
    assert torch.equal(bits_of(joined[~lost]), bits_of(plain[~lost]))
