"""Offload(optimizer="auto"): state in host memory before a longer forward, in what users do between that forward and
step(), and after a call that raised: to the bits of the run without offload, within the budget, and nothing is lost."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import Residual
from tests.models.nested_inputs import NestedInputs
from tests.offload.test_auto_parameters import SMALLEST, largest
from tests.parity.whole import LAMB

WIDTH, DEPTH = 32, 6


class Journey:
    """A model that trains, what its losses were, and the most bytes on the device in each step."""

    def __init__(self, offload: Any, *, classes: Sequence[Any] = (torch.optim.AdamW,), **fields: Any) -> None:
        onefold.init()
        torch.manual_seed(0)
        settings = {"step_in_backward": fields.pop("step_in_backward", False)}
        fields = {"stage": 3, "units": (Residual,), "bucket_bytes": 4 * WIDTH**2, **fields}
        self.model = onefold.shard(NestedInputs(WIDTH, DEPTH), offload=offload, **fields)
        params, share = [*self.model.parameters()], 18 if len(classes) == 2 else 36
        groups = [[{"params": params[at : at + share]}] for at in range(0, len(params), share)]
        self.optimizers = [
            onefold.Optimizer(self.model, cls, groups=group, lr=1e-2, **settings)
            for cls, group in zip(classes, groups, strict=True)
        ]
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def x(self, rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows + len(self.peaks)))

    def backward(self, *batches: int, last: Callable[[], None] = lambda: None, nested: bool = False) -> None:
        """Forwards and backwards of micro-batches with so many rows; `last` is called before the last of them."""
        for number, rows in enumerate(batches, start=1):
            if number == len(batches):
                last()
            given = {"batch": {"images": {"x": [self.x(rows)]}}} if nested else {"x": self.x(rows)}
            with onefold.accumulate(self.model) if number < len(batches) else nullcontext():
                loss = self.model(**given).square().mean()
                loss.backward()
            self.losses.append(loss.item())

    def step(
        self,
        *batches: int,
        between: Callable[[], None] = lambda: None,
        backwards: Sequence[int] = (0, 1),
        forwards: int = 1,
        nested: bool = False,
    ) -> None:
        """A step of micro-batches; `between` is called before step(), which Optimizers make in the order `backwards`.
        With several `forwards` a backward goes through the graphs of as many."""
        with onefold.track_memory(self.model) as seen:
            if forwards > 1:
                sum(self.model(self.x(rows)).square().mean() for rows in batches * forwards).backward()  # type: ignore[union-attr]
            else:
                self.backward(*batches, nested=nested)
            between()
            for at in backwards[: len(self.optimizers)] if len(self.optimizers) > 1 else (0,):
                self.optimizers[at].step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            engine_of(self.model).updates.wait()
        self.peaks.append(seen.peak_bytes)

    @property
    def parked(self) -> int:
        """The units whose optimizer state is parked."""
        return sum(unit.parked for unit in engine_of(self.model).units)

    def fail(self, rows: int, *, in_backward: bool = False) -> None:
        """A forward or backward that raises early, and gradients are dropped."""

        def refuse(*_: Any) -> None:
            raise ZeroDivisionError("early")

        first, end = self.model.blocks[0], self.model.blocks[-1]
        hook = end.register_full_backward_hook if in_backward else first.register_forward_pre_hook
        handle = hook(refuse)
        with pytest.raises(ZeroDivisionError):
            self.backward(rows)
        handle.remove()
        self.optimizers[0].zero_grad()


# -- what users do ----------------------------------------------------------------------------------------------------


def is_gathered_in_the_middle(run: Journey) -> None:
    def gather() -> None:
        onefold.full_state_dict(run.model)

    for rows in (16, 128, 128, 16, 128):
        run.step(rows, between=gather if rows == 128 else lambda: None)


def is_gathered_between_micro_batches(run: Journey) -> None:
    run.step(16)
    with onefold.track_memory(run.model) as seen:
        run.backward(16, 16, 128, last=lambda: None)
        onefold.full_state_dict(run.model)
        run.optimizers[0].zero_grad()
        run.backward(128)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    run.peaks.append(seen.peak_bytes)
    run.step(128)


def is_averaged_before_the_step(run: Journey) -> None:
    average = onefold.EMA(run.model, 0.9)
    for rows in (16, 128, 128, 128):
        run.step(rows, between=average.update)


def raises_in_a_longer_forward(run: Journey) -> None:
    run.step(16)
    run.fail(128)
    for rows in (16, 128, 128):
        run.step(rows)


def raises_in_the_first_forward(run: Journey) -> None:
    run.fail(128)
    for rows in (16, 128, 128):
        run.step(rows)


def raises_in_a_longer_backward(run: Journey) -> None:
    run.step(16)
    run.fail(128, in_backward=True)
    for rows in (16, 128, 128):
        run.step(rows)


def shrinks_and_grows(run: Journey) -> None:
    for rows in (16, 64, 16, 128, 32, 128, 256, 16, 256):
        run.step(rows)


def has_several_graphs_at_once(run: Journey) -> None:
    run.step(64)
    for forwards in (2, 2, 3, 3, 1):
        run.step(64, forwards=forwards)


def grows_within_a_step(run: Journey) -> None:
    run.step(16)
    run.step(16, 16)
    run.step(32, 64, 256)
    run.step(256, 32, 16)


def accumulates_then_is_as_long_as_before(run: Journey) -> None:
    for batches in ((16,), (128,), (16, 16, 16), (128,), (128,)):
        run.step(*batches)


def has_nested_inputs(run: Journey) -> None:
    for rows in (16, 16, 128, 128, 16):
        run.step(rows, nested=True)


def steps_in_another_order(run: Journey) -> None:
    for rows in (16, 128, 128, 16, 256, 256):
        run.step(rows, backwards=(1, 0))


def trains_on(run: Journey) -> None:
    for rows in (16, 16, 128, 128, 16):
        run.step(rows)


def gets_a_new_optimizer(run: Journey) -> None:
    run.step(16)
    run.backward(128)
    run.optimizers = [onefold.Optimizer(run.model, torch.optim.AdamW, lr=1e-2)]
    assert run.parked == 0, "by the older one"
    run.optimizers[0].zero_grad()
    for rows in (128, 128):
        run.step(rows)


def loses_its_first_optimizer(run: Journey) -> None:
    run.step(16)
    run.backward(128)
    del run.optimizers[0]
    gc.collect()
    run.optimizers[0].step()
    run.optimizers[0].zero_grad()
    assert run.parked == 0, "by the one that is gone"
    run.step(16)


class Trip(NamedTuple):
    """What a model does, and how it was made."""

    script: Callable[[Journey], None]
    fields: dict[str, Any] = {}  # noqa: RUF012
    fill: float = 0.4  # 0: the budget is the peak of the smallest placement; 1: that of the run without offload


TWO = {"classes": (torch.optim.AdamW, torch.optim.AdamW)}
TRIPS = {
    "gathered in the middle": Trip(is_gathered_in_the_middle),
    "gathered, and a backward after it": Trip(is_gathered_between_micro_batches),
    "averaged before step()": Trip(is_averaged_before_the_step),
    "raises in a longer forward": Trip(raises_in_a_longer_forward),
    "raises in the first forward": Trip(raises_in_the_first_forward),
    "raises in a longer backward": Trip(raises_in_a_longer_backward),
    "shrinks and grows": Trip(shrinks_and_grows),
    "shrinks and grows, blocks kept": Trip(shrinks_and_grows, {"activations": "auto"}),
    "shrinks and grows, updated in backward": Trip(shrinks_and_grows, {"step_in_backward": True}),
    "several graphs at once": Trip(has_several_graphs_at_once),
    "grows within a step": Trip(grows_within_a_step),
    "longer before sums are fp32, and after": Trip(
        accumulates_then_is_as_long_as_before, {"precision": "bf16"}, fill=0.9
    ),
    "nested inputs": Trip(has_nested_inputs),
    "two Optimizers in another order": Trip(steps_in_another_order, TWO),
    "two Optimizers in another order, blocks kept": Trip(steps_in_another_order, {**TWO, "activations": "auto"}),
    "SGD beside AdamW": Trip(trains_on, {"classes": (torch.optim.SGD, torch.optim.AdamW)}, fill=0.8),
    "a new Optimizer": Trip(gets_a_new_optimizer),
    "the first of two Optimizers goes": Trip(loses_its_first_optimizer, TWO),
}


class Seen(NamedTuple):
    losses: list[float]
    params: dict[str, Tensor]
    peaks: list[int]


def travel(trip: Trip, offload: Any) -> Seen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Journey(offload, **trip.fields)
        trip.script(run)
    return Seen(run.losses, onefold.full_state_dict(run.model), run.peaks)


def tried(name: str) -> list[str]:
    """What differs, or takes too much."""
    trip = TRIPS[name]
    plain, low = travel(trip, None), travel(trip, SMALLEST)
    most, least = largest(max(plain.peaks), max(low.peaks))
    budget = int(least + trip.fill * (most - least)) + 64
    auto = travel(trip, onefold.Offload(optimizer="auto", device_bytes=budget))
    wrong = [f"{auto.losses} instead of {plain.losses}"] * (auto.losses != plain.losses)
    wrong += [name for name in plain.params if not torch.equal(plain.params[name], auto.params[name])]
    return [*wrong, *[f"{auto.peaks} of {budget} bytes"] * (max(auto.peaks) > budget)]


RANKS = [(1, name) for name in TRIPS] + [(2, "two Optimizers in another order"), (2, "grows within a step")]


@pytest.mark.parametrize(("ranks", "name"), RANKS)
def test_what_is_parked_changes_no_bit_and_leaves_room(ranks: int, name: str) -> None:
    assert run_ranks(ranks, tried, name) == [[]] * ranks


# -- one rank of several, and what is there meanwhile -----------------------------------------------------------------


def after_ranks_compared(in_backward: bool) -> list[float]:
    """The last rank alone runs a longer forward when the ranks have told each other what they do in this step."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    run = Journey(onefold.Offload(optimizer="auto", device_bytes=700_000), step_in_backward=in_backward)

    def forward_again() -> None:
        if not in_backward:
            run.optimizers[0].clip_grad_norm(1.0)
        run.losses.append(run.model(run.x(256 if last else 16)).sum().item() * 0)

    for number in range(5):
        run.step(16, between=forward_again if number == 2 else lambda: None)  # some steps are looked at anyway
    assert run.parked == 0
    return run.losses


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_longer_forward_before_step_on_one_rank_alone_stops_no_rank(in_backward: bool) -> None:
    found = run_ranks(2, after_ranks_compared, in_backward)
    assert all(len(losses) == 6 for losses in found)


def memory_meanwhile() -> tuple[int, int, bool, bool]:
    """Bytes of optimizer state in host memory before and while it is parked; whether reports agree with plans."""
    run = Journey(onefold.Offload(optimizer="auto", device_bytes=700_000), precision="bf16")
    run.model.forward = lambda x, forward=run.model.forward: forward(x.bfloat16())
    run.step(16)
    before = onefold.memory(run.model)
    run.backward(256)
    assert run.parked == len(engine_of(run.model).units)
    during = onefold.memory(run.model)
    agrees = [(row.measured, row.planned) for row in (during.optimizer, *during.elsewhere) if row is not None]
    return before.host, during.host, all(m <= p for m, p in agrees), during.optimizer.measured < 1000


def test_reports_count_what_is_parked_in_host_memory() -> None:
    ((before, during, agrees, left),) = run_ranks(1, memory_meanwhile)
    assert during > before + 200_000 and agrees and left


def nested_rows(layout: torch.layout) -> float:
    run = Journey(onefold.Offload(optimizer="auto", device_bytes=700_000))
    for rows in (16, 64, 16):
        lengths = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(rows, 4)], layout=layout)
        run.model(run.x(rows), lengths=lengths).square().mean().backward()
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    return sum(param.sum().item() for param in onefold.full_state_dict(run.model).values())


def test_inputs_may_be_nested_tensors() -> None:
    for layout in (torch.jagged, torch.strided):
        assert run_ranks(1, nested_rows, layout)


def left_over() -> list[tuple[bool, int]]:
    """Of models that nobody holds any more in the first step, and while state is parked: whether they are still there,
    and how many dispatch modes."""
    found = []
    for steps in (0, 1, 2):
        run = Journey(onefold.Offload(optimizer="auto", device_bytes=700_000))
        for _ in range(steps):
            run.step(16)
        run.backward(256)
        alive = weakref.ref(run.model)
        del run
        gc.collect()
        found.append((alive() is not None, _len_torch_dispatch_stack()))
    return found


def test_a_model_that_is_let_go_of_before_step_leaves_nothing() -> None:
    assert run_ranks(1, left_over) == [[(False, 0)] * 3]


# -- state in another memory format -----------------------------------------------------------------------------------


def channels_last(offload: Any) -> tuple[dict[str, Tensor], bool]:
    """Filters in channels_last, trained by a class that sums over whole tensors; whether their state was parked."""
    onefold.init()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU()) for _ in range(4)]
    model = onefold.shard(
        nn.Sequential(*layers).to(memory_format=torch.channels_last), stage=2, units=(nn.Sequential,), offload=offload
    )
    optimizer, parked = onefold.Optimizer(model, LAMB, lr=1e-2), False
    for number, rows in enumerate((2, 8, 8, 2, 8, 8)):
        x = torch.randn(rows, 8, 6, 6, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        parked = parked or any(unit.parked for unit in engine_of(model).units)
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model), parked


def differing_filters() -> list[str]:
    (plain, _), (auto, parked) = (
        channels_last(None),
        channels_last(onefold.Offload(optimizer="auto", device_bytes=60_000)),
    )
    assert parked
    return [name for name in plain if not torch.equal(plain[name], auto[name])]


@pytest.mark.filterwarnings("ignore::onefold.errors.PlacementWarning")
def test_state_that_moves_keeps_its_memory_format() -> None:
    assert run_ranks(1, differing_filters) == [[]]
