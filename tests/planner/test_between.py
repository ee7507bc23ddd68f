"""What lies between the products of a block: bytes as torch's operators move them, fewer of them where compiled, and
how long messages, kernels and blocks take beside each other."""

from __future__ import annotations

import dataclasses
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
from onefold.cost.hardware import hardware, recorded
from onefold.cost.prefetch import exposed_s
from onefold.cost.rates import Rates
from onefold.cost.seconds import exposed_in_backward, exposed_in_step
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


def test_messages_of_both_kinds_at_once_take_as_long_as_was_measured_and_not_the_sum():
    both = [1.0] * 4, [1.0] * 4, [0.1] * 4, 1
    one_link = exposed_in_backward(*both)
    assert one_link == pytest.approx(8 - 0.4)
    assert exposed_in_backward(*both, at_once=1.0) < 5, "each kind has its own link"
    assert exposed_in_backward(*both, at_once=2.0) == one_link, "both share one"
    alone = [0.0] * 4, [1.0] * 4, [0.1] * 4, 1
    assert exposed_in_backward(*alone, at_once=1.3) == pytest.approx(exposed_in_backward(*alone)), (
        "nothing of the other kind"
    )


def test_a_unit_is_gathered_after_its_update_while_later_ones_are_still_reduced():
    reducing, computing = [1.0] * 4, [1.0] * 4
    alone = exposed_in_backward([0.0] * 4, reducing, computing, 1, at_once=1.0)
    found = exposed_in_backward([0.0] * 4, reducing, computing, 1, at_once=1.0, updated_s=[1.0] * 4)
    assert alone == 1.0 and found == 4.0, "backward, then four gathers, of which the first hides the last reduction"
    slow = exposed_in_backward([0.0] * 4, [3.0] * 4, computing, 1, at_once=1.0, updated_s=[3.0] * 4)
    assert slow == 1 + 4 * 3 + 3 - 4, "only the last gather has no reduction beside it"
    over_one = exposed_in_backward([0.0] * 4, [3.0] * 4, computing, 1, updated_s=[3.0] * 4)
    assert over_one == 1 + 4 * 3 + 4 * 3 - 4, "one link carries all"
    several = {"unit_numel": [1] * 4, "gather_s": [], "reduce_s": 12.0, "prefetch": 1, "checkpointed": False}
    twice = exposed_in_step(6.0, **several, updated_s=12.0, micro_batches=2, rounds=2, at_once=1.0)
    first = exposed_in_step(6.0, **several, updated_s=0.0, micro_batches=1, rounds=1, at_once=1.0)
    last = exposed_in_step(6.0, **several, updated_s=12.0, micro_batches=1, rounds=1, at_once=1.0)
    assert twice == pytest.approx(first + last), "only the last backward of a step is followed by an update"


def test_messages_in_flight_slow_compute_and_no_other():
    quiet = [0.0] * 4, [0.0] * 4, [1.0] * 4, 1
    assert exposed_in_backward(*quiet, slowed=1.5) == 0.0
    hidden = [0.0] * 4, [0.5] * 4, [1.0] * 4, 1
    assert exposed_in_backward(*hidden) == 0.5
    busy_s = 3 * 0.5  # beside the compute of the last three units, which meanwhile does 1/1.5 of it
    assert exposed_in_backward(*hidden, slowed=1.5) == pytest.approx(0.5 + busy_s * (1 - 1 / 1.5))
    bound = exposed_s([2.0] * 4, [1.0] * 4, 1, slowed=1.5)
    assert bound == pytest.approx(exposed_s([2.0] * 4, [1.0] * 4, 1)), "a link that is the limit hides it"
    assert exposed_s([0.5] * 4, [1.0] * 4, 1, slowed=1.5) > exposed_s([0.5] * 4, [1.0] * 4, 1)


def cpu_ranks(link_rate: float, core_rate: float) -> Estimate:
    """Two CPU ranks whose products all have one rate."""
    record = {**ideal(flops=1e11, bandwidth=1e10), "kind": "cpu", "updates": {"device": [[1 << 23, 28, 0.02]]}}
    record |= {part: {"fp32": record[part]["bf16"]} for part in ("products", "attention", "elementwise", "loss")}
    machine = dataclasses.replace(
        recorded(Rates(record)), device="cpu", node_ranks=1, nics=1, nic_rate=link_rate, node_link=link_rate,
        core_rate=core_rate,
    )  # fmt: skip
    work = Work(widths=widths_of("fp32", None), shape=Shape(layers=8, hidden=512, heads=8, seq=1024, vocab=512))
    return Estimate(
        work=work, choice=Choice(3, activations="keep"), grid=grid_of(2), hardware=machine, cost=named_cost("adamw"),
    )  # fmt: skip


def test_messages_that_compute_hides_still_take_the_cores_of_cpu_ranks():
    free, costly = (cpu_ranks(1e10, rate) for rate in (1e15, 1e9))
    on_cores = costly.messages.on_cpu_s
    assert on_cores == pytest.approx(sum(sent.bytes for sent in costly.messages.traffic.values()) / 1e9)
    waits = [found.time.step.exposed for found in (free, costly)]
    assert waits[0] < 0.01 * free.time.step.compute
    assert 0.6 * on_cores < waits[1] - waits[0] < on_cores, "the last reduction is not hidden"
    slow = [cpu_ranks(1e6, rate).time.step.exposed for rate in (1e15, 1e9)]
    assert slow[1] == pytest.approx(slow[0], rel=0.01), "over a slow link the cores wait anyway"


def test_the_cores_of_a_record_have_a_rate_and_a_time_of_each_message():
    rows = [[1000, 1e-3 + 500e-6], [5000, 1e-3 + 2500e-6]]
    assert Rates({"links": {"ranks": 2, "cores": rows}}).cores == pytest.approx((1e-3, 1e6))
    assert Rates({"links": {"ranks": 2, "all_gather": rows}}).cores is None
