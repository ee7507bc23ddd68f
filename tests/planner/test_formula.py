"""The formula for a shape, beside a rehearsal of the module that has it: what a GPU holds at the fullest instant."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import onefold
from onefold.comm.mesh import simulated_axes
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import hardware
from onefold.cost.limits import COPYING
from onefold.cost.shapes import Shape
from onefold.cost.work import Work, grid_of
from onefold.observe.rehearsal import Rehearsal, rehearse
from onefold.optim.elementwise import cost_of
from onefold.settings.offload import Offload
from onefold.settings.precision import Precision
from onefold.settings.widths import widths_of
from onefold.settings.zero import Zero
from onefold.sharding import shard_over
from onefold.train.run.model import GPT
from tests.harness.grids import thinned

DEEP = Shape(layers=4, hidden=128, heads=4, seq=128, vocab=256)  # blocks are the most of it
WORDY = Shape(layers=2, hidden=64, heads=2, seq=64, vocab=4096)  # embedding, logits and loss are
ADAMW = cost_of("adamw")
ABOVE, BELOW = 0.03, 0.01
SEVERAL = 0.08  # above, where blocks of several units fill memory: all they work with is taken to stay to the last one


class Case:
    """One way to train one shape on GPUs."""

    def __init__(
        self, shape: Shape, batch: int, stage: int, ranks: int, precision: str, activations: str, *,
        tiers: tuple[str, ...] = (), bucket_bytes: int = 32 << 20, reshard: bool = True, node_ranks: int = 8,
        micro_batches: int = 1,
    ) -> None:  # fmt: skip
        self.shape, self.batch, self.stage, self.ranks, self.activations = shape, batch, stage, ranks, activations
        self.policy = Precision(compute=precision, master="split" if precision == "bf16" else None)
        self.machine = dataclasses.replace(hardware("h200"), node_ranks=node_ranks)
        self.micro_batches = micro_batches
        self.tiers, self.bucket_bytes = dict(zip(("optimizer", "parameters"), tiers)), bucket_bytes
        self.reshard = reshard

    def estimate(self, *, inside: bool = False) -> Estimate:
        decided = self.policy.decided(own_sum=True, cuda=True)
        assert isinstance(decided.compute, torch.dtype)
        widths = decided.dtypes(decided.compute).widths
        if self.micro_batches > 1 and widths.narrow:
            widths = widths._replace(grad=4)
        return Estimate(
            work=Work(widths=widths, shape=self.shape, bucket_bytes=self.bucket_bytes, auto_wire=True),
            choice=Choice(self.stage, activations=self.activations, **self.tiers), grid=grid_of(self.ranks),
            hardware=self.machine, cost=ADAMW, batch=self.batch, in_backward=inside, micro_batches=self.micro_batches,
            reshard_after_forward=self.reshard,
        )  # fmt: skip

    def rehearsed(self) -> Rehearsal:
        tokens = torch.zeros(self.batch, self.shape.seq, dtype=torch.long)
        zero = Zero(
            stage=self.stage, precision=self.policy, activations=self.activations, bucket_bytes=self.bucket_bytes,
            offload=Offload(**self.tiers), reshard_after_forward=self.reshard,
        )  # fmt: skip
        with torch.device("meta"):
            model = GPT(self.shape)
        return rehearse(
            model, (tokens, tokens), zero, ADAMW, ranks=self.ranks, plays="nccl", node_ranks=self.machine.node_ranks,
            micro_batches=self.micro_batches,
        )  # fmt: skip

    def check(self, above: float = ABOVE) -> None:
        """The peak is that of the rehearsal, and so are the bytes of a step's reductions, to the byte."""
        found, seen = self.estimate(), self.rehearsed()
        off = (found.peak_bytes - found.memory.margin) / seen.peak_bytes - 1
        assert -BELOW <= off <= above, f"{off:+.1%} at {found.memory.fullest}"
        if self.ranks > 1:
            reduced = seen.sent["reduce", "reduce-scatter"]
            assert (found.messages.traffic["reduce"].bytes, found.messages.traffic["reduce"].calls) == reduced


@pytest.mark.parametrize(
    "case",
    [
        Case(DEEP, 8, 0, 1, "bf16", "keep"),
        Case(DEEP, 1, 0, 1, "fp32", "checkpoint"),
        Case(DEEP, 1, 1, 8, "bf16", "checkpoint"),
        Case(WORDY, 2, 2, 8, "bf16", "keep"),
        Case(DEEP, 2, 3, 1, "bf16", "keep", tiers=("host",)),
        Case(DEEP, 1, 2, 16, "bf16", "checkpoint"),
        Case(DEEP, 1, 2, 32, "bf16", "checkpoint", node_ranks=1),
    ],
    ids=lambda case: f"stage {case.stage} of {case.ranks}, {case.machine.node_ranks} on each node",
)
def test_the_peak_on_a_gpu_is_that_of_the_rehearsal(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_between_steps_one_gpu_has_but_the_last_gradients_that_went_to_the_host(micro_batches: int) -> None:
    unit = 1 << 18
    case = Case(DEEP, 2, 3, 1, "bf16", "keep", tiers=("host",), micro_batches=micro_batches, bucket_bytes=unit)
    seen, widest = case.rehearsed(), 4 if micro_batches > 1 else 2
    assert 0 < seen.communication <= COPYING * unit * widest // 2 < widest * DEEP.numel
    assert not any(flow.sent_bytes for flow in seen.sent.values()), "one rank sends nothing"


def test_the_buffers_of_accumulating_reductions_are_those_of_the_rehearsal() -> None:
    """Sums of micro-batches are in fp32, and a 16-bit copy of them travels."""
    case = Case(DEEP, 1, 2, 8, "bf16", "checkpoint", micro_batches=2)
    assert case.estimate().memory.fullest.buffers == case.rehearsed().peak["communication"]


def test_the_peak_of_blocks_of_several_units_is_not_below_the_rehearsal() -> None:
    Case(DEEP, 2, 3, 64, "bf16", "checkpoint", bucket_bytes=1 << 17).check(SEVERAL)


@pytest.mark.parametrize(("shape", "activations"), thinned([DEEP, WORDY], ["keep", "checkpoint"]))
def test_the_peak_where_parameters_stay_unsharded_after_forward(shape: Shape, activations: str) -> None:
    Case(shape, 1, 3, 8, "bf16", activations, bucket_bytes=1 << 19, reshard=False).check(SEVERAL)
    case = Case(shape, 8, 3, 8, "bf16", activations, bucket_bytes=1 << 19, reshard=False)
    case.check(SEVERAL)
    sharded = Case(shape, 8, 3, 8, "bf16", activations, bucket_bytes=1 << 19).estimate()
    more = case.estimate().peak_bytes - sharded.peak_bytes
    assert more >= 0 if (shape, activations) == (DEEP, "checkpoint") else more > 0  # there backward ends fullest
    assert case.estimate().time.step.total <= sharded.time.step.total
    assert "gather-backward" in sharded.messages.traffic and "gather-backward" not in case.estimate().messages.traffic


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 8), (1, 8), (2, 8), (2, 64), (3, 8), (3, 64)])
def test_the_peak_on_a_gpu_is_that_of_the_rehearsal_over_a_grid(stage: int, ranks: int) -> None:
    for shape, batch, precision, activations in itertools.product(
        (DEEP, WORDY), (1, 8), ("bf16", "fp32"), ("keep", "checkpoint")
    ):
        Case(shape, batch, stage, ranks, precision, activations).check()


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "ranks"), [(1, 8), (2, 8), (3, 8), (3, 1)])
def test_the_peak_on_a_gpu_is_that_of_the_rehearsal_where_the_host_updates(stage: int, ranks: int) -> None:
    for batch, activations in itertools.product((1, 8), ("keep", "checkpoint")):
        Case(DEEP, batch, stage, ranks, "bf16", activations, tiers=("host",)).check()
        if stage == 3:
            Case(DEEP, batch, stage, ranks, "bf16", activations, tiers=("host", "host")).check()


def test_on_a_gpu_gradients_come_as_activations_go() -> None:
    """With many tokens the fullest instant is the start of backward, which knows no gradients; with few, its end."""
    short = dataclasses.replace(DEEP, seq=8)
    many, few = (Case(short, batch, 0, 1, "bf16", "keep").estimate() for batch in (1024, 1))
    assert (
        many.memory.persistent_states.gradients == 0
        and many.memory.fullest.gradients < 0.001 * many.memory.device_states.gradients
    )
    assert few.memory.fullest.gradients > 0.7 * few.memory.device_states.gradients
    adding_up = dataclasses.replace(many, micro_batches=2)
    assert adding_up.peak_bytes - many.peak_bytes == pytest.approx(many.memory.device_states.gradients, rel=0.01)


def test_updates_inside_backward_hold_a_few_units_of_gradients() -> None:
    deep = dataclasses.replace(DEEP, layers=48)
    block = 2 * 12 * deep.hidden**2
    case = Case(deep, 1, 0, 1, "bf16", "checkpoint", bucket_bytes=block + block // 2)  # a unit per block
    held = [case.estimate(inside=inside).memory.fullest for inside in (False, True)]
    assert held[0].gradients > 40 * block and held[1].gradients < 5 * block


def test_on_a_cpu_buffers_and_gradients_stay() -> None:
    found = dataclasses.replace(Case(DEEP, 8, 2, 8, "fp32", "keep").estimate(), hardware=hardware("laptop"))
    assert (
        found.memory.persistent_bytes
        == found.memory.device_states.total + found.memory.fullest.buffers
        > found.memory.device_states.total
        > 0
    )
    assert (
        found.memory.persistent_states == found.memory.device_states
        and found.memory.fullest.gradients == found.memory.margin == 0
    )


def test_5b_on_an_h200_has_the_peak_its_allocator_counted() -> None:
    """24 × 4096, 8 sequences of 1024, nothing computed again, torch 2.11: 85.2 GiB."""
    found = Case(Shape(layers=24, hidden=4096, heads=32), 8, 0, 1, "bf16", "keep").estimate()
    assert (found.peak_bytes - found.memory.margin) / 2**30 == pytest.approx(85.2, rel=0.005)
    assert found.memory.persistent_states.total == pytest.approx(12 * found.work.parameters, rel=0.001)


def test_small_blocks_of_a_shape_share_units_as_they_do_in_a_run() -> None:
    shape = Shape(layers=6, hidden=512, heads=8, seq=32, vocab=512)
    with torch.device("meta"):
        model = GPT(shape)
    shard_over(simulated_axes(2, plays="gloo", values=False), model, None, {"stage": 3, "device": "cpu"})
    planned = Work(widths=widths_of("fp32", None), shape=shape).sizes(grid_of(2))
    sharded = [row.elements for row in onefold.placement(model).rows]
    assert [unit.used_numel for unit in planned.units] == sharded and 3 < len(sharded) < 9
