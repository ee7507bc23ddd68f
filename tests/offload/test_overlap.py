"""Overlap is real: the host updates one unit while the model runs others, inside backward and in the next forward.

Nothing is timed. A unit's update is held back until the model has come to another place, and the model is held there
until the update has run: if either waited for the other to end first, neither would go on.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

import onefold
from onefold.cost.limits import WORKERS
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import Watched

PATIENCE_S = 60.0


class Meeting:
    """Two threads are here at the same time, or neither passes."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self.met = False

    def come(self) -> None:
        if not self.met:
            self._barrier.wait(PATIENCE_S)
            self.met = True


def built(stage: int, inside: bool, depth: int = 4):
    onefold.init()
    torch.manual_seed(0)
    layers = nn.Sequential(*(Watched() for _ in range(depth)))
    model = onefold.shard(
        layers, stage=stage, precision="bf16", offload="host", units=Watched, bucket_bytes=1 << 10, prefetch=0
    )
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=inside)
    for _ in range(2):  # the order of units is known then
        step(model, adam)
    engine_of(model).updates.wait()
    return model, adam, {by.unit.layout.slots[0].name.split(".")[0]: by for by in adam.by_unit}


def step(model: nn.Module, adam: onefold.Optimizer, clip: bool = False) -> None:
    model(torch.randn(4, 32).bfloat16()).float().square().sum().backward()
    if clip:
        adam.clip_grad_norm(0.1)
    adam.step()
    adam.zero_grad()


def update_meets(by_unit, meeting: Meeting) -> None:
    """This unit's next update begins in the meeting."""
    plain = by_unit.update

    def update(*args, **kwargs) -> None:
        assert threading.current_thread() is not threading.main_thread()
        meeting.come()
        plain(*args, **kwargs)

    by_unit.update = update


def updates_run_inside_backward(stage: int) -> bool:
    """The last layer's update is not over before the first layer's backward has begun."""
    model, adam, units = built(stage, inside=True)
    meeting = Meeting()
    update_meets(units["3"], meeting)
    model[0].on_backward = meeting.come
    step(model, adam)
    return meeting.met


def updates_run_in_the_next_forward(stage: int) -> bool:
    """The last layer's update is not over before the first layer's next forward has begun; with clipping."""
    model, adam, units = built(stage, inside=False)
    meeting = Meeting()
    update_meets(units["3"], meeting)
    step(model, adam, clip=True)
    model[0].on_forward = meeting.come
    step(model, adam, clip=True)
    engine_of(model).updates.wait()
    return meeting.met


def test_a_unit_is_updated_while_backward_goes_on() -> None:
    assert run_ranks(1, updates_run_inside_backward, 3) == [True]
    assert run_ranks(2, updates_run_inside_backward, 3) == [True] * 2
    assert run_ranks(2, updates_run_inside_backward, 2) == [True] * 2


def test_with_clipping_a_unit_is_updated_while_the_next_forward_runs() -> None:
    assert run_ranks(1, updates_run_in_the_next_forward, 3) == [True]
    assert run_ranks(2, updates_run_in_the_next_forward, 3) == [True] * 2


def first_layer_first() -> list[str]:
    model, adam, units = built(3, inside=False)
    seen: list[str] = []
    for name, by_unit in units.items():
        plain = by_unit.update
        by_unit.update = lambda *a, plain=plain, name=name, **k: (seen.append(name), plain(*a, **k))
    step(model, adam, clip=True)
    engine_of(model).updates.wait()
    return seen


def test_units_are_updated_in_the_order_in_which_forward_needs_them() -> None:
    """Threads take them in that order, and then each goes its own pace."""
    for seen in run_ranks(2, first_layer_first):
        assert sorted(seen) == list("0123")
        assert all(abs(place - int(name)) < WORKERS for place, name in enumerate(seen)), seen


def backward_waits_for_room(depth: int) -> tuple[bool, int, int, int]:
    """No update ends before backward has to wait for room: whether it had to, and bytes of gradients: the most that
    waited at once, as many as may, and all."""
    model, adam, units = built(2, inside=True, depth=depth)
    room, held_up = engine_of(model).updates.host.room, threading.Event()
    for by_unit in units.values():
        plain = by_unit.update
        by_unit.update = lambda *a, plain=plain, **k: (held_up.wait(PATIENCE_S), plain(*a, **k))
    take, give, sizes, waiting, lock = room.take, room.give, [], [0], threading.Lock()

    def counted(nbytes: int) -> int:
        """The bytes that are taken now, which are never more than the room knows of."""
        with lock:
            waiting.append(waiting[-1] + nbytes)
            return waiting[-1]

    def watched(nbytes: int) -> None:
        if counted(0) + nbytes > room.total_bytes:
            held_up.set()
        take(nbytes)
        sizes.append(nbytes)
        counted(nbytes)

    def given(nbytes: int) -> None:
        counted(-nbytes)
        give(nbytes)

    room.take, room.give = watched, given
    step(model, adam)
    engine_of(model).updates.wait()
    return held_up.is_set(), max(waiting), room.total_bytes, sum(sizes)


def test_backward_waits_for_the_host_where_too_many_gradients_wait_on_the_device() -> None:
    for ranks in (1, 2):
        for waited, most_bytes, room_bytes, all_bytes in run_ranks(ranks, backward_waits_for_room, 16):
            assert waited
            assert 0 < most_bytes <= room_bytes == all_bytes // 4
