"""What lies between the products of a block: bytes as torch's operators move them, fewer of them where compiled, and
how long messages, kernels and blocks take beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.cost.between import Passes, _norm, _rotary, fused, written_out
from onefold.cost.case import Choice
from onefold.cost.compute import shape_seconds
from onefold.cost.decoders import Decoder
from onefold.cost.estimate import Estimate
from onefold.cost.families import FAMILIES
from onefold.cost.hardware import hardware
from onefold.cost.rates import Rates
from onefold.cost.seconds import exposed_in_backward
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.work import Work, grid_of
from onefold.settings.widths import widths_of
from tests.planner.test_rates import ideal

QWEN = FAMILIES["qwen2.5-1.5b"]
ROWS, WIDTH = 64, 512


class Operators(TorchDispatchMode):
    """Counts the bytes that operators read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in str(func):
            moved = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)]
            self.bytes += sum(leaf.untyped_storage().nbytes() if 0 in leaf.stride() else leaf.nbytes for leaf in moved)
        return found


def moved(work: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[float, float]:
    """Bytes per element of an input in forward and in backward."""
    x = torch.zeros(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Operators() as forward:
        output = work(x)
    with Operators() as backward:
        output.backward(torch.empty_like(output))
    return forward.bytes / x.numel(), backward.bytes / x.numel()


def rms_norm(x: Tensor) -> Tensor:
    """As transformers writes it for Llama and Qwen."""
    weight = torch.ones(WIDTH, dtype=x.dtype, device="meta", requires_grad=True)
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rotary(x: Tensor) -> Tensor:
    """As transformers writes it."""
    cos = sin = torch.zeros(x.shape[-1], dtype=x.dtype, device="meta")
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize(("work", "counted"), [(rms_norm, _norm(2)), (rotary, _rotary(2))], ids=["norm", "rotary"])
def test_operators_of_a_decoder_move_the_bytes_that_are_counted(work: Callable[[Tensor], Tensor], counted: Passes):
    forward, backward = moved(work, (ROWS, WIDTH))
    assert forward == pytest.approx(counted.forward.bytes, rel=0.1)
    assert backward == pytest.approx(counted.backward.bytes, rel=0.1)


def test_a_compiled_block_moves_a_fraction_in_fewer_kernels():
    for shape in (QWEN, FAMILIES["qwen2.5-7b"]):
        assert isinstance(shape, Decoder)
        plain, compiled = written_out(shape, 2), fused(shape, 2)
        for one, other in zip(plain, compiled, strict=True):
            assert 0.2 < other.bytes / one.bytes < 0.6 and other.kernels < one.kernels / 3
    gpt = Shape(layers=1, hidden=1024, heads=16)
    assert fused(gpt, 2, tp=2).forward.bytes < fused(gpt, 2).forward.bytes < 40 * 1024 * 2


def test_a_plan_knows_compiled_blocks():
    def planned(*, compiled: bool) -> Estimate:
        return Estimate(
            work=Work(widths=widths_of("bf16", "split"), shape=QWEN), choice=Choice(3, activations="keep"),
            grid=grid_of(1), hardware=hardware("h200"), cost=named_cost("adamw"), batch=4, compiled=compiled,
        )  # fmt: skip

    eager, compiled = planned(compiled=False), planned(compiled=True)
    assert 1.1 < compiled.tokens_per_s / eager.tokens_per_s < 1.5


def test_blocks_never_count_as_less_than_their_kernels_unless_they_ran_for_seconds():
    one = Shape(layers=1, hidden=4096, heads=32, vocab=8)
    plain = shape_seconds(one, Rates(ideal()), 8, "keep")
    rested = {"bf16": [[8192, 4096, 128, 1024, 0.8 * plain.forward, 0.9 * plain.backward]]}
    assert shape_seconds(one, Rates(ideal(blocks=rested)), 8, "keep") == pytest.approx(plain)
    long = {"bf16": [[8192, 4096, 128, 1024, 0.95 * (plain.forward + plain.backward)]]}
    found = shape_seconds(one, Rates(ideal(blocks=rested, sustained=long)), 8, "keep")
    assert found.total == pytest.approx(0.95 * plain.total, rel=0.02)


def test_a_small_kernel_takes_no_longer_than_a_launch_and_its_share_of_a_large_one():
    slow = [[1 << 20, 1e-4, 1e-4], [1 << 28, 256e-6, 512e-6]]  # the small one was timed at the host's pace
    record = {"kind": "cuda", "elementwise": {"bf16": {"norm": slow}}, "host": {"launch": 5e-6}}
    assert Rates(record).elementwise("bf16", "norm", 1 << 20) == pytest.approx((6e-6, 7e-6))
    assert Rates(record).elementwise("bf16", "norm", 1 << 28) == pytest.approx((256e-6, 512e-6))
    assert Rates({**record, "kind": "cpu"}).elementwise("bf16", "norm", 1 << 20) == pytest.approx((1e-4, 1e-4))


def test_the_latency_of_a_slow_link_is_without_the_time_of_its_bytes():
    rows = [[1000, 1e-3 + 500 / 1e6], [2 * 10**6, 1.0]]
    link = Rates({"links": {"ranks": 2, "all_gather": rows}}).link_rate()
    assert link == pytest.approx((1e-3, 1e6))


def test_the_last_reduction_of_backward_has_nothing_to_hide_behind():
    for units in (1, 2, 8):
        share = 1 / units
        assert exposed_in_backward([0.0] * units, [share] * units, [2 * share] * units, 1) == pytest.approx(share)
    assert exposed_in_backward([1.0, 1.0], [0.0, 0.0], [2.0, 2.0], 0) == 2.0, "gathered at need: both are waited for"
    assert exposed_in_backward([1.0, 1.0], [0.0, 0.0], [2.0, 2.0], 1) == 1.0
    bound = exposed_in_backward([1.0] * 4, [1.0] * 4, [0.5] * 4, 1)
    assert bound == pytest.approx(8 - 2), "one link: what it carries less what computes"
