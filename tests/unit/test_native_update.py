"""The CPU's update kernel: the bits of torch's own classes, whatever the numbers, wherever an element stands."""

from __future__ import annotations

import itertools
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onefold.optim.kernels.cpu import Written, available, fits, update
from onefold.optim.kernels.rule import next_step
from onefold.state.rounding import join, narrow, split
from tests.unit.test_rounding import ADVERSE, SIGN, bits_of, floats

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
TILE = 512  # elements that the kernel takes together
FORMS = [(BF16, BF16, "split"), (BF16, BF16, "fp32"), (FP16, FP16, "fp32"), (FP32, BF16, "split"),
         (FP32, BF16, "fp32"), (FP32, FP16, "fp32")]  # fmt: skip
ADVERSE_BITS = ADVERSE + [bits | SIGN for bits in ADVERSE]
pytestmark = pytest.mark.skipif(not available(), reason="needs a C compiler")
ALIKE = platform.machine() in ("aarch64", "arm64")  # torch's kernels for x86 fuse other products and sums


class Vectors(NamedTuple):
    """What a slice holds."""

    copy: Tensor
    master: Tensor
    state: dict[str, Any]

    @classmethod
    def of(cls, values: Tensor, copy: torch.dtype, master: str, state: dict[str, Any]) -> Vectors:
        rounded, rest = torch.empty_like(values, dtype=copy), torch.empty_like(values, dtype=torch.int16)
        narrow(values, rounded)
        if master == "split":
            split(values, rounded, rest)
        own = {key: value.clone() for key, value in state.items()}
        return cls(rounded, rest if master == "split" else values.clone(), own)

    def values(self) -> Tensor:
        if self.master.dtype is FP32:
            return self.master
        wide = torch.empty(self.master.numel())
        join(self.copy, self.master, wide)
        return wide

    def part(self, start: int, stop: int) -> Vectors:
        """A view of some elements; the step count is of its own."""
        cut = {key: value[start:stop] if value.ndim else value.clone() for key, value in self.state.items()}
        return Vectors(self.copy[start:stop], self.master[start:stop], cut)


def update_slice(cls, group, state, grad, copy, master, factor, threads):
    update(next_step(cls, group, state, grad.numel(), CPU), grad, copy, master, factor, threads)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


def agree(a: Tensor, b: Tensor) -> bool:
    return same_bits(a, b) if ALIKE else torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """The same bits, but a NaN is a NaN."""
    return bool(((bits_of(a) == bits_of(b)) | (a.isnan() & b.isnan())).all())


# -- the same arithmetic in torch ------------------------------------------------------------------------------------


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: in fp64 the product is exact, and a sum that was rounded is made odd, so that rounding
    it again cannot meet a tie that was none."""
    product, c = torch.as_tensor(a, dtype=FP32).double() * b.double(), c.double()
    total = product + c
    virtual = total - product
    lost = (product - (total - virtual)) + (c - virtual)
    bits = total.view(torch.int64)
    inexact = total.isfinite() & (lost != 0) & (bits % 2 == 0)
    towards = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def reference(cls: Any, group: dict[str, Any], state: dict[str, Any], grad: Tensor, value: Tensor) -> Tensor:
    """The new value; the state is updated in place."""
    one = [torch.tensor(number, dtype=FP32) for number in (group["lr"], group["weight_decay"])]
    if group["weight_decay"] and cls is not AdamW:
        grad = fma(one[1], value, grad)
    if cls is SGD:
        if group["momentum"]:
            first = state["momentum_buffer"] * torch.tensor(group["momentum"], dtype=FP32) + grad
            grad = fma(group["momentum"], first, grad) if group["nesterov"] else first
            state["momentum_buffer"] = first
        return fma(-one[0], grad, value)
    state["step"] = state["step"] + 1
    (beta1, beta2), count = group["betas"], float(state["step"])
    numbers = [1 - beta1, beta2, 1 - beta2, -group["lr"] / (1 - beta1**count), (1 - beta2**count) ** 0.5, group["eps"]]
    rest1, keep2, rest2, size, root, eps = (torch.tensor(number, dtype=FP32) for number in numbers)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    near = rest1 < 0.5
    first = fma(rest1 if near else rest1 - 1, grad - first, first if near else grad)
    second = fma(keep2, second, rest2 * grad * grad) if group["fused"] else fma(rest2 * grad, grad, keep2 * second)
    state["exp_avg"], state["exp_avg_sq"] = first, second
    if cls is AdamW:
        value = value * torch.tensor(1 - group["lr"] * group["weight_decay"], dtype=FP32)
    return value + size * first / (second.sqrt() / root + eps)


def numbers(generator: torch.Generator, numel: int) -> Tensor:
    """A quarter any bits at all, a quarter adverse ones, the rest what training holds."""
    wild = torch.randint(-(1 << 31), (1 << 31) - 1, (numel,), generator=generator).int().view(FP32)
    adverse = floats(ADVERSE_BITS)[torch.randint(0, len(ADVERSE_BITS), (numel,), generator=generator)]
    scale = 10.0 ** torch.randint(-9, 2, (numel,), generator=generator)
    usual = torch.randn(numel, generator=generator) * scale
    kind = torch.randint(0, 4, (numel,), generator=generator)
    return torch.where(kind == 0, wild, torch.where(kind == 1, adverse, usual))


def state_of(cls: Any, group: dict[str, Any], generator: torch.Generator, numel: int, count: int) -> dict[str, Any]:
    if cls is SGD:
        return {"momentum_buffer": numbers(generator, numel)} if group["momentum"] else {}
    moments = {"exp_avg": numbers(generator, numel), "exp_avg_sq": numbers(generator, numel)}
    return {"step": torch.tensor(float(count)), **moments}


shared = {"lr": st.sampled_from([1e-3, 0.0, 0.7]), "weight_decay": st.sampled_from([0.0, 0.1]), "fused": st.booleans()}
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.2, 0.95), (0.0, 0.0)])
adam = st.fixed_dictionaries({**shared, "betas": betas, "eps": st.sampled_from([1e-8, 0.0])})
momentum = {"momentum": st.sampled_from([0.0, 0.9]), "nesterov": st.booleans()}
sgd = st.fixed_dictionaries({**shared, **momentum}).filter(lambda group: group["momentum"] or not group["nesterov"])
rules = st.tuples(st.sampled_from([Adam, AdamW]), adam) | st.tuples(st.just(SGD), sgd)
sizes = st.integers(1, 70) | st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE + 3, 40 * TILE + 64])
PLAIN: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": False, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.mark.skipif(not ALIKE, reason="torch rounds differently on this processor")
@settings(max_examples=150, deadline=None)
@given(rules, st.sampled_from(FORMS), sizes, st.sampled_from([1.0, 0.37, 2.0**-16]), st.integers(0, 2), st.integers())
@example((AdamW, PLAIN), FORMS[0], 40 * TILE + 64, 0.37, 0, 0)
def test_every_element_is_updated_as_torch_would(rule, form, numel, factor, count, seed):
    (cls, group), (grad_dtype, copy, master) = rule, form
    generator = torch.Generator().manual_seed(seed % (1 << 60))
    values, grad = numbers(generator, numel), numbers(generator, numel).to(grad_dtype)
    state = state_of(cls, group, generator, numel, count)
    ours = Vectors.of(values, copy, master, state)
    update_slice(cls, group, ours.state, grad, ours.copy, ours.master, factor, threads=1)
    wanted = reference(cls, group, state, grad.float() * torch.tensor(factor, dtype=FP32), values)
    wanted = torch.where(wanted.isnan(), floats([0x7FC00000]), wanted)
    assert same_bits(ours.values(), wanted)
    rounded = torch.empty_like(ours.copy)
    narrow(wanted, rounded)
    assert same_bits(ours.copy, rounded)
    assert ours.state.keys() == state.keys()
    assert all(same_numbers(ours.state[key], state[key]) for key in state)


# -- where an element stands -----------------------------------------------------------------------------------------


def taken(rule: Any, form: Any, numel: int, seed: int) -> tuple[Vectors, Tensor]:
    (cls, group), (grad_dtype, copy, master) = rule, form
    generator = torch.Generator().manual_seed(seed % (1 << 60))
    values, grad = numbers(generator, numel), numbers(generator, numel).to(grad_dtype)
    return Vectors.of(values, copy, master, state_of(cls, group, generator, numel, 3)), grad


def assert_same(a: Vectors, b: Vectors) -> None:
    """Every bit, those of NaNs too."""
    assert same_bits(a.copy, b.copy) and same_bits(a.master, b.master)
    assert all(same_bits(a.state[key], b.state[key]) for key in a.state)


@settings(max_examples=40, deadline=None)
@given(rules, st.sampled_from(FORMS), st.lists(st.integers(0, 3000), max_size=4), st.integers())
def test_a_slice_may_be_cut_anywhere(rule, form, cuts, seed):
    (whole, grad), (parts, _) = taken(rule, form, 3000, seed), taken(rule, form, 3000, seed)
    update_slice(*rule, whole.state, grad, whole.copy, whole.master, 0.5, threads=1)
    edges = [0, *sorted(cuts), 3000]
    for start, stop in itertools.pairwise(edges):
        part = parts.part(start, stop)
        update_slice(*rule, part.state, grad[start:stop], part.copy, part.master, 0.5, threads=1)
    if "step" in parts.state:
        parts.state["step"] += 1
    assert_same(whole, parts)


@settings(max_examples=40, deadline=None)
@given(rules, st.sampled_from(FORMS), sizes, st.integers())
def test_what_is_written_elsewhere_has_the_same_bits_and_what_is_read_stays(rule, form, numel, seed):
    (inside, grad), (read, _), (before, _) = (taken(rule, form, numel, seed) for _ in range(3))
    update_slice(*rule, inside.state, grad, inside.copy, inside.master, 0.5, threads=1)
    step = next_step(*rule, read.state, numel, CPU)
    moments = [torch.empty_like(moment) for moment in (step.first, step.second) if moment is not None]
    to = Written(torch.empty_like(read.copy), torch.empty_like(read.master), *([*moments, None, None][:2]))
    update(step, grad, read.copy, read.master, 0.5, 1, to=to)
    if "step" in before.state:
        before.state["step"] += 1
    assert_same(read, before)
    state = dict(zip((key for key in read.state if key != "step"), moments, strict=True))
    assert_same(Vectors(to.copy, to.master, state), inside)


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_threads_changes_no_bit(form):
    rule, numel = (Adam, PLAIN), 64 * TILE + 70
    first, grad = taken(rule, form, numel, 0)
    update_slice(*rule, first.state, grad, first.copy, first.master, 0.5, threads=1)
    for threads in (2, 3, 8):
        other, grad = taken(rule, form, numel, 0)
        update_slice(*rule, other.state, grad, other.copy, other.master, 0.5, threads)
        assert_same(first, other)


def test_threads_of_the_program_may_update_at_once():
    rule, numel = (AdamW, PLAIN), 64 * TILE
    slices = [taken(rule, FORMS[0], numel, seed) for seed in range(4)]
    alone = [taken(rule, FORMS[0], numel, seed) for seed in range(4)]
    for vectors, grad in alone:
        update_slice(*rule, vectors.state, grad, vectors.copy, vectors.master, 1.0, threads=2)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(update_slice, *rule, v.state, g, v.copy, v.master, 1.0, threads=2) for v, g in slices]:
            done.result()
    for (ours, _), (theirs, _) in zip(slices, alone):
        assert_same(ours, theirs)


# -- torch's classes -------------------------------------------------------------------------------------------------

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2}), (AdamW, {"lr": 1e-2, "weight_decay": 0.0}), (Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    (Adam, {"lr": 1e-2, "betas": (0.5, 0.99)}), (Adam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 1}),
    (SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "weight_decay": 1}), (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["foreach", "fused", "neither"])
@pytest.mark.parametrize(("cls", "kwargs"), CLASSES)
def test_torchs_own_class_gives_the_same_bits_and_the_same_state(cls, kwargs, mode):
    """Class and kernel take turns too: each goes on with the other's state. On x86 the last bits may differ."""
    torch.manual_seed(0)
    values, modes = torch.randn(64 * 100), {} if mode == "neither" else {mode: True}
    theirs = nn.Parameter(values.clone())
    optimizer = cls([theirs], **kwargs, **modes)
    ours, turns = Vectors.of(values, BF16, "split", {}), Vectors.of(values, FP16, "fp32", {})
    mixed = nn.Parameter(turns.master)
    mixer = cls([mixed], **kwargs, **modes)
    for step in range(6):
        grad = (torch.randn(values.numel()) * 10.0**-step).bfloat16()
        grad[:64] = -0.0
        theirs.grad, mixed.grad = grad.float() * 0.37, grad.float() * 0.37
        optimizer.step()
        group = optimizer.param_groups[0]
        assert fits(cls, group, CPU)
        update_slice(cls, group, ours.state, grad, ours.copy, ours.master, 0.37, threads=1)
        if step % 2:
            mixer.step()
        else:
            update_slice(cls, group, mixer.state[mixed], grad.float(), turns.copy, turns.master, 0.37, threads=1)
    assert agree(ours.values(), theirs.detach()) and agree(mixed.detach(), theirs.detach())
    wanted = optimizer.state[theirs]
    assert ours.state.keys() == wanted.keys() == mixer.state[mixed].keys()
    assert all(agree(ours.state[key], wanted[key]) and ours.state[key].shape == wanted[key].shape for key in wanted)


@pytest.mark.parametrize("unknown", ["amsgrad", "maximize", "capturable", "differentiable", "dampening"])
def test_settings_it_does_not_know_are_left_to_torch(unknown):
    assert not fits(SGD, {unknown: 0.5}, CPU) and fits(SGD, {unknown: 0.0}, CPU)
    assert not fits(torch.optim.Adagrad, {}, CPU) and not fits(SGD, {}, torch.device("cuda"))


# -- 16 bits ---------------------------------------------------------------------------------------------------------


def test_every_half_is_widened_exactly():
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(FP16)
    copy, master = torch.zeros_like(halves), torch.full((halves.numel(),), -0.0)
    group = {"lr": -1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    update_slice(SGD, group, {}, halves, copy, master, 1.0, threads=1)
    assert same_numbers(master, halves.float())
    assert same_numbers(copy, halves) and (bits_of(copy)[halves.isnan()] == 0x7E00).all()


def test_every_tie_between_halves_and_its_neighbours_are_rounded_as_torch_does():
    halves = torch.arange(0, 0x7C00).to(torch.int16).view(FP16).float()
    middle = (halves + torch.cat([halves[1:], torch.tensor([65536.0])])) / 2
    near = torch.cat([halves, *((middle.view(torch.int32) + step).view(FP32) for step in (-1, 0, 1))])
    more = floats(ADVERSE_BITS)
    values = torch.cat([near, -near, more[~more.isnan()]])
    copy, grad = torch.zeros_like(values, dtype=FP16), torch.zeros_like(values)
    group = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    update_slice(SGD, group, {}, grad, copy, values.clone(), 1.0, threads=1)
    assert same_bits(copy, values.half())


def test_a_copy_set_by_hand_counts_where_its_remainder_means_nothing():
    copy = torch.tensor([0.0, -0.0, float("inf"), 1.0], dtype=BF16)
    rest = torch.tensor([-5, -5, 5, 5], dtype=torch.int16)
    group = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    update_slice(SGD, group, {}, torch.zeros_like(copy), copy, rest, 1.0, threads=1)
    assert copy.tolist() == [0.0, 0.0, float("inf"), 1.0] and rest.tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_copy_to_which_its_fp32_master_does_not_round_replaces_it(dtype):
    values = torch.tensor([1.0 + 2**-14, -0.3, 0.0, 5.0, 1e-30, float("nan")]).repeat(200)
    wanted, copy = values.clone(), torch.empty_like(values, dtype=dtype)
    narrow(values, copy)
    copy[3::12], copy[2::12] = 7.0, float("-inf")
    wanted[3::12], wanted[2::12] = 7.0, float("-inf")
    group = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    rule = next_step(SGD, group, {}, copy.numel(), CPU)
    for edits, master in ((False, values), (True, wanted)):
        own, seen = values.clone(), copy.clone()
        update(rule, torch.zeros_like(copy), seen, own, 1.0, 1, edits=edits)
        assert same_numbers(own, master)
