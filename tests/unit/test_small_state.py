"""Optimizer state in bf16 and in 8 bits: what a code keeps of a number, that rounding has no bias, and that the CPU's
kernel and operations of torch give the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onefold.cost.layout import Span
from onefold.optim.kernels import cpu, small
from onefold.optim.kernels.codec import (
    BLOCK,
    bits_for_8,
    bits_for_bf16,
    from_8bit,
    to_8bit,
)
from onefold.optim.kernels.rule import next_step
from onefold.optim.kernels.small import SmallStep, moments_in
from onefold.state.random_rounding import Keys, keys_of, random_bits, to_bf16
from onefold.state.rounding import join, narrow, split
from tests.unit.test_rounding import ADVERSE, SIGN, bits_of, floats

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
INF, NAN, MOST, LEAST = float("inf"), float("nan"), torch.finfo(FP32).max, torch.finfo(FP32).tiny
ADVERSE_BITS = ADVERSE + [bits | SIGN for bits in ADVERSE]
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3 * BLOCK)
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.3, 0.9)}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]
FORMS = [(BF16, "split", BF16), (BF16, "fp32", FP32), (FP16, "fp32", FP16), (FP32, None, FP32)]


def random_of(seed: int, numel: int) -> Tensor:
    return random_bits(Keys(seed, 7 * seed + 1), 0, numel, CPU)


def coded(values: Tensor, *, second: bool, seed: int | None = None) -> Tensor:
    """Values as 8 bits keep them: to the nearest, or rounded by random bits."""
    given = {} if seed is None else {"random": bits_for_8(random_of(seed, values.numel()), second=second)}
    return from_8bit(*to_8bit(values, second=second, **given), second=second)


# -- one number ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(words=WORDS, second=st.booleans(), seed=st.none() | st.integers(0, 100))
@example(words=ADVERSE_BITS, second=False, seed=None)
@example(words=ADVERSE_BITS, second=False, seed=3)
@example(words=ADVERSE_BITS, second=True, seed=3)
def test_a_code_is_a_neighbour_of_its_value(words: list[int], second: bool, seed: int | None) -> None:
    """Whatever the bits: within an eighth, or below the smallest code of the block; NaN, infinities and zeros stay."""
    values = floats(words).abs() if second else floats(words)
    kept = coded(values, second=second, seed=seed)
    blocks = torch.arange(values.numel()) // BLOCK
    for block in range(int(blocks[-1]) + 1):
        of, got = values[blocks == block], kept[blocks == block]
        assert torch.equal(of.isnan(), got.isnan())
        assert torch.equal(of.isinf(), got.isinf())
        zero = of.abs() < LEAST
        assert bool((got[zero] == 0).all())
        if not of.isfinite().all():  # of a block with an infinity only what is not finite is kept
            continue
        largest = of.abs().max().double()
        smallest = max(2 * largest * 2.0 ** -(31 if second else 15), LEAST)  # the scale may be the next power of two
        error, near = (of.double() - got.double()).abs(), of.abs().double() / 8
        assert bool((error <= near.clamp(min=float(smallest))).all())
        assert bool(((got.sign() == of.sign()) | (got == 0)).all())
        assert not second or bool((got[~zero] > 0).all()), "Adam divides by the root of a second moment"


@settings(deadline=None)
@given(words=WORDS, second=st.booleans())
@example(words=ADVERSE_BITS, second=False)
def test_what_was_coded_once_is_exact_afterwards(words: list[int], second: bool) -> None:
    """So state may go through fp32 and bf16 and back."""
    values = floats([word for word in words if floats([word]).isfinite()] or [0])
    kept = coded(values.abs() if second else values, second=second)
    assert torch.equal(bits_of(coded(kept, second=second)), bits_of(kept))
    assert torch.equal(bits_of(to_bf16(kept).float()), bits_of(kept))


@settings(deadline=None)
@given(words=WORDS, seed=st.none() | st.integers(0, 100))
@example(words=ADVERSE_BITS, seed=None)
@example(words=ADVERSE_BITS, seed=5)
def test_bf16_is_a_neighbour_of_its_value(words: list[int], seed: int | None) -> None:
    values = floats(words)
    given = () if seed is None else (bits_for_bf16(random_of(seed, values.numel()), second=False),)
    kept = to_bf16(values, *given).float()
    assert torch.equal(values.isnan(), kept.isnan()) and torch.equal(values.isinf(), kept.isinf())
    fine = values.isfinite()
    step = (values[fine].abs().double() / 128).clamp(min=2.0**-133)
    assert bool(((values[fine].double() - kept[fine].double()).abs() <= step).all())
    exact = to_bf16(values)
    assert torch.equal(bits_of(to_bf16(exact.float(), *given).float()[fine]), bits_of(exact.float()[fine]))


def test_numbers_that_are_not_finite_stay_in_their_block() -> None:
    values = torch.cat([torch.tensor([INF, -INF, NAN, 0.0, 1.0, MOST]), torch.ones(BLOCK - 6), torch.ones(BLOCK)])
    kept = coded(values, second=False)
    assert kept[:5].tolist()[:2] == [INF, -INF] and kept[2].isnan() and kept[3:5].tolist() == [0.0, 0.0]
    assert kept[5].isfinite() and kept[5] > MOST / 2
    assert torch.equal(kept[BLOCK:], torch.ones(BLOCK))
    assert to_bf16(torch.tensor([MOST, -MOST])).isfinite().all()


# -- rounding at random ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "8bit"])
@pytest.mark.parametrize("second", [False, True])
def test_the_mean_of_roundings_is_the_value(form: str, second: bool) -> None:
    """Within five standard deviations of the mean of 4000 roundings; the nearest value is farther off."""
    torch.manual_seed(0)
    numel, count = 2 * BLOCK, 4000
    values = torch.rand(numel) + 0.5 if second else torch.randn(numel)
    values[::7] *= 2.0**-9  # first moments: near the smallest code
    bits = random_bits(keys_of(0, "weight", 1), 0, count * numel, CPU)
    if form == "bf16":
        near, rounded = to_bf16(values), to_bf16(values.repeat(count), bits_for_bf16(bits, second=second))
    else:
        near, random = coded(values, second=second), bits_for_8(bits, second=second)
        rounded = from_8bit(*to_8bit(values.repeat(count), random, second=second), second=second)
    gap = values.abs().double() / (128 if form == "bf16" else 8)  # between two neighbours, at most
    sure = 5 * 0.5 * gap / count**0.5
    off = (rounded.view(count, numel).double().mean(0) - values.double()).abs()
    assert bool((off <= sure).all()), (off / sure).max()
    assert ((near.double() - values.double()).abs() > sure).double().mean() > 0.5, "rounding to the nearest would pass"


def test_a_moment_follows_changes_far_below_its_last_bit() -> None:
    """Adam's second moment may decay by a thousandth per step: rounded to the nearest it would stay where it is."""
    start, steps, rate = torch.full((32 * BLOCK,), 1.0), 300, 0.9985
    wanted = rate**steps
    for form in ("bf16", "8bit"):
        at_random, nearest = start.clone(), start.clone()
        for step in range(steps):
            bits = random_bits(keys_of(1, "weight", step), 0, start.numel(), CPU)
            if form == "bf16":
                at_random = to_bf16(at_random * rate, bits_for_bf16(bits, second=True)).float()
                nearest = to_bf16(nearest * rate).float()
            else:
                given = bits_for_8(bits, second=True)
                at_random = from_8bit(*to_8bit(at_random * rate, given, second=True), second=True)
                nearest = coded(nearest * rate, second=True)
        assert abs(at_random.mean().item() / wanted - 1) < 0.03, form
        assert nearest.mean().item() == 1.0, form


def test_random_bits_are_a_function_of_seed_step_parameter_and_index_only() -> None:
    whole = random_bits(keys_of(0, "weight", 5), 0, 4096, CPU)
    assert torch.equal(random_bits(keys_of(0, "weight", 5), 1000, 96, CPU), whole[1000:1096])
    others = [keys_of(1, "weight", 5), keys_of(0, "bias", 5), keys_of(0, "weight", 6)]
    for keys in others:
        equal = (random_bits(keys, 0, 4096, CPU) == whole).double().mean()
        assert equal < 0.01
    ones = torch.stack([(whole >> bit) & 1 for bit in range(32)]).double().mean(1)
    assert bool(((ones - 0.5).abs() < 0.05).all())


# -- a step ----------------------------------------------------------------------------------------------------------


class Vectors(NamedTuple):
    """A parameter as a unit holds it, and its state."""

    copy: Tensor | None
    master: Tensor
    state: dict[str, Any]

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype, master: str | None) -> Vectors:
        if master is None:
            return cls(None, values.clone(), {})
        copy, rest = torch.empty_like(values, dtype=dtype), torch.empty_like(values, dtype=torch.int16)
        narrow(values, copy)
        if master == "split":
            split(values, copy, rest)
        return cls(copy, rest if master == "split" else values.clone(), {})

    def values(self) -> Tensor:
        if self.master.dtype is FP32:
            return self.master
        wide = torch.empty(self.master.numel())
        assert self.copy is not None
        join(self.copy, self.master, wide)
        return wide


def steps_of(
    cls: Any, group: dict[str, Any], state: dict[str, Any], numel: int, form: str, *parts: Span
) -> list[SmallStep]:
    """The next step of a parameter, on some parts of it."""
    rule = next_step(cls, group, state, numel, CPU, form)
    moments, keys = moments_in(cls, group, state), keys_of(0, "weight", int(state["step"]))
    return [SmallStep(rule, tuple(moment.at(part) for moment in moments), keys, part.start) for part in parts]


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[key].reshape(-1).view(torch.uint8), b[key].reshape(-1).view(torch.uint8)) for key in a)


@pytest.mark.skipif(not cpu.available(), reason="needs a C compiler")
@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_the_kernel_and_operations_of_torch_give_the_same_bits(form: str) -> None:
    """For every rule, master and dtype of gradients; in one call, by threads, or cut where blocks end."""
    torch.manual_seed(0)
    numel, used = 40 * BLOCK, 37 * BLOCK + 13  # the last elements are padding
    whole, cuts = Span(0, used), (Span(0, 5 * BLOCK), Span(5 * BLOCK, 21 * BLOCK), Span(21 * BLOCK, used))
    for cls, chosen in CLASSES:
        group = {key: v for key, v in cls([torch.zeros(1)], **chosen).param_groups[0].items() if key != "params"}
        for dtype, master, grads in FORMS:
            values = torch.randn(numel)
            reference, by_torch = values.clone(), dict[str, Any]()
            kernels = [Vectors.of(values, dtype, master) for _ in range(3)]
            for _ in range(3):
                grad = (torch.randn(used) * torch.exp(3 * torch.randn(used))).clamp(-6e4, 6e4).to(grads)
                [step] = steps_of(cls, group, by_torch, numel, form, whole)
                small.update(step, grad, reference[:used], 0.5)
                for (copy, stored, state), parts, threads in zip(kernels, ([whole], [whole], cuts), (1, 3, 1)):
                    for at, step in zip(parts, steps_of(cls, group, state, numel, form, *parts), strict=True):
                        here = slice(at.start, at.stop)
                        beside = None if copy is None else copy[here]
                        cpu.update_small(step, grad[here], beside, stored[here], 0.5, threads, edits=False)
                for vectors in kernels:
                    assert same_state(by_torch, vectors.state), (cls, dtype, master)
                    assert torch.equal(bits_of(vectors.values()), bits_of(reference)), (cls, dtype, master)


NEAR = [  # a block's exponents: close together; around the least code of a first and of a second moment; at the ends
    st.lists(st.integers(low << 23, (high << 23) - 1), min_size=BLOCK, max_size=BLOCK)
    for low, high in ((120, 128), (112, 129), (96, 129), (250, 255), (0, 3), (0, 34))
]
SPARSE = st.tuples(st.sampled_from([0.0, 0.3, 0.9]), st.integers(0, 100))


@pytest.mark.skipif(not cpu.available(), reason="needs a C compiler")
@settings(deadline=None, max_examples=200)
@given(blocks=st.lists(st.one_of(*NEAR), min_size=8, max_size=8), sparse=SPARSE)
@example(blocks=[(ADVERSE_BITS * BLOCK)[at * 7 : at * 7 + BLOCK] for at in range(8)], sparse=(0.0, 0))
@example(blocks=[(ADVERSE_BITS * BLOCK)[at * 7 : at * 7 + BLOCK] for at in range(8)], sparse=(0.3, 1))
def test_the_kernel_codes_every_block_as_operations_of_torch_do(
    blocks: list[list[int]], sparse: tuple[float, int]
) -> None:
    """SGD's first moment is the gradient itself; Adam's have its bits and its square's. Blocks without small elements
    take a shorter way."""
    share, seed = sparse
    draw = torch.Generator().manual_seed(seed)
    words = torch.tensor([word for block in blocks for word in block])
    words ^= torch.randint(0, 2, words.shape, generator=draw) << 31  # signs
    words[torch.rand(words.shape, generator=draw) < share] = 0
    grad = floats(words.tolist())
    root = grad.abs().sqrt()  # whose squares are where these blocks are
    for cls, chosen, given_grad in ((SGD, {"lr": 0.0, "momentum": 0.9}, grad), (AdamW, {"betas": (0.0, 0.0)}, root)):
        group = {key: v for key, v in cls([torch.zeros(1)], **chosen).param_groups[0].items() if key != "params"}
        by_torch, by_kernel, numel = dict[str, Any](), dict[str, Any](), grad.numel()
        for _ in range(2):
            [step] = steps_of(cls, group, by_torch, numel, "8bit", Span(0, numel))
            small.update(step, given_grad, torch.zeros(numel), 1.0)
            [step] = steps_of(cls, group, by_kernel, numel, "8bit", Span(0, numel))
            cpu.update_small(step, given_grad, None, torch.zeros(numel), 1.0, 1, edits=False)
            assert same_state(by_torch, by_kernel), (cls, words)


def test_a_flag_on_the_device_leaves_everything_as_it_was() -> None:
    group = {key: v for key, v in AdamW([torch.zeros(1)]).param_groups[0].items() if key != "params"}
    for form in ("bf16", "8bit"):
        state, values, part = dict[str, Any](), torch.randn(BLOCK), Span(0, BLOCK)
        small.update(*steps_of(AdamW, group, state, BLOCK, form, part), torch.randn(BLOCK), values, 1.0)
        before = {key: value.clone() for key, value in state.items() if key != "step"}
        was, [step] = values.clone(), steps_of(AdamW, group, state, BLOCK, form, part)
        small.update(step, torch.full((BLOCK,), NAN), values, 1.0, torch.ones(()))
        assert torch.equal(values, was) and same_state(before, state)
        small.update(step, torch.ones(BLOCK), values, 1.0, torch.zeros(()))
        assert not torch.equal(values, was)
