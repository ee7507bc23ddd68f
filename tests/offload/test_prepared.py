"""Updates that run in backward before clipping is known: kept or not, the bits are those of updates at step()."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.cost.limits import WORKERS
from onefold.optim.host_update import UpdateOnHost
from onefold.optim.prepared import InPlaceUpdate
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.offload.runs import PRECISIONS

WIDTH, ROOM = 32, 1 << 24


class Life:
    """A model whose optimizer is on the host, with or without memory for prepared updates."""

    def __init__(self, precision: str, folder: str, **offload: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        place = onefold.Offload(optimizer="host", **offload)
        self.model = onefold.shard(
            layers, stage=3, precision=PRECISIONS[precision], offload=place, units=nn.Linear, bucket_bytes=1 << 10
        )
        self.adam = onefold.Optimizer(self.model, torch.optim.AdamW, lr=1e-2, on_nonfinite="skip")
        self.folder, self.generator = folder, torch.Generator().manual_seed(torch.distributed.get_rank())
        policy = engine_of(self.model).updates
        assert isinstance(policy, UpdateOnHost)
        self.prepared, self.queue = policy.host.prepared, policy.host.queue

    def forward_and_backward(self, scale: float = 1.0) -> None:
        x = torch.randn(2, WIDTH, generator=self.generator) * scale
        self.adam.backward(self.model(x).float().square().mean())

    def backward(self, scale: float = 1.0) -> None:
        self.forward_and_backward(scale)
        engine_of(self.model).schedule.drain()  # else which updates have begun when step() comes is up to the threads
        self.prepared.wait()

    def end(self) -> None:
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> list[Tensor]:
        rows = self.adam.state_dict()["slices"]
        held = [value for row in rows for value in row["state"].values()]
        return [*onefold.full_state_dict(self.model).values(), *held]


def clip_below(life: Life) -> None:
    life.adam.clip_grad_norm(1e-3)


def clip_above(life: Life) -> None:
    life.adam.clip_grad_norm(1e9)


def change_rate(life: Life) -> None:
    life.adam.param_groups[0]["lr"] *= 0.5


def write_gradients(life: Life) -> None:
    for _, piece in life.adam.gradients():
        piece.mul_(0.5)


def again(life: Life) -> None:
    """Another backward before step(): its gradients are added."""
    life.backward()


def begin_anew(life: Life) -> None:
    life.adam.zero_grad()
    life.backward()


def write_parameters(life: Life) -> None:
    with onefold.full_parameters(life.model, write=True), torch.no_grad():
        next(life.model.parameters()).mul_(0.5)


def save(life: Life) -> None:
    onefold.save(life.folder, life.model, life.adam, overwrite=True, step=0)


def load(life: Life) -> None:
    """What `save` saved; gradients are dropped with it."""
    onefold.load(life.folder, life.model, life.adam)
    life.backward()


def drop_one(life: Life) -> None:
    """One parameter is left alone in this step."""
    next(life.model.parameters()).grad = None


def overflow(life: Life) -> None:
    life.adam.zero_grad()
    life.backward(math.inf)
    life.adam.clip_grad_norm(1.0)


def nothing(life: Life) -> None:
    pass


class Between(NamedTuple):
    """What happens between backward and step(), and to which share of the updates that were prepared."""

    does: Callable[[Life], None]
    kept: bool = False
    lost: bool = False


EVENTS = [
    Between(nothing),  # the first step makes the state
    Between(nothing, kept=True),
    Between(clip_above, kept=True),
    Between(clip_below, lost=True),
    Between(clip_below),  # the last step clipped: nothing is prepared
    Between(nothing),
    Between(change_rate, lost=True),
    Between(nothing, kept=True),
    Between(write_gradients, lost=True),
    Between(again, kept=True, lost=True),
    Between(begin_anew, kept=True, lost=True),
    Between(write_parameters, lost=True),
    Between(save, lost=True),
    Between(overflow, lost=True),
    Between(drop_one, kept=True),
    Between(nothing, kept=True),
    Between(load, kept=True, lost=True),
    Between(nothing, kept=True),
]


def lives(precision: str, folder: str, offload: dict[str, Any]) -> list[str]:
    """On every rank: where a life with prepared updates differs from one without, and unexpected numbers of them."""
    onefold.init()
    plain, ours = (Life(precision, f"{folder}/{room}", spare_bytes=room, **offload) for room in (0, ROOM))
    found, units = [], [one.inner is not None for one in ours.adam.by_unit]
    for number, event in enumerate(EVENTS):
        before = ours.prepared.kept, ours.prepared.lost
        for life in (plain, ours):
            life.backward()
            event.does(life)
            life.end()
        counts = ours.prepared.kept - before[0], ours.prepared.lost - before[1]
        kept = sum(units) - (event.does is drop_one and units[0])
        wanted = kept * event.kept, sum(units) * event.lost
        if counts != wanted:
            found.append(f"{number} {event.does.__name__}: {counts} kept and lost instead of {wanted}")
        if not all(torch.equal(a, b) for a, b in zip(plain.state(), ours.state(), strict=True)):
            found.append(f"{number} {event.does.__name__}: other bits")
    assert (plain.prepared.kept, plain.prepared.lost) == (0, 0)
    return found


@pytest.mark.parametrize(
    ("precision", "parameters", "ranks"), [("split", None, 1), ("fp16", None, 2), ("bf16", "host", 2)]
)
def test_prepared_updates_are_kept_when_step_says_what_was_assumed_and_change_no_bit(
    precision: str, parameters: str | None, ranks: int, tmp_path
) -> None:
    assert run_ranks(ranks, lives, precision, str(tmp_path), {"parameters": parameters}) == [[]] * ranks


class Busy:
    """A job that keeps a worker thread until it is told to end."""

    def __init__(self) -> None:
        self.done, self.error, self.goes_on = threading.Event(), None, threading.Event()

    def ready(self) -> bool:
        return True

    def run(self) -> None:
        self.goes_on.wait()

    def finish(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise error


def begun_by_step(precision: str) -> tuple[list[str], int, int]:
    """Where a life whose prepared updates no thread has begun when step() comes differs from one without them, how many
    units were updated beside their spare memory, and how many units there are."""
    onefold.init()
    plain, ours = (Life(precision, "", spare_bytes=room) for room in (0, ROOM))
    for life in (plain, ours):
        for _ in range(2):
            life.backward()
            life.end()
    found, lent, run = list[str](), [], InPlaceUpdate.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InPlaceUpdate, "run", lambda job: (lent.append(job), run(job)))
        for event in (nothing, clip_above, clip_below, nothing):
            engine_of(ours.model).updates.wait()  # of the step before
            busy = [Busy() for _ in range(WORKERS)]
            for job in busy:
                ours.queue.put(0, job)
            ours.forward_and_backward()
            event(ours)
            ours.adam.step()
            for job in busy:
                job.goes_on.set()
            ours.adam.zero_grad()
            plain.backward()
            event(plain)
            plain.end()
            if not all(torch.equal(a, b) for a, b in zip(plain.state(), ours.state(), strict=True)):
                found.append(f"{event.__name__}: other bits")
    return found, len(lent), len(ours.adam.by_unit)


@pytest.mark.parametrize("precision", ["split", "bf16"])
def test_updates_that_no_thread_has_begun_are_made_in_place_beside_spare_memory(precision: str) -> None:
    """So that none waits for the device. After a step that clips, the next one prepares nothing."""
    [(found, lent, units)] = run_ranks(1, begun_by_step, precision)
    assert (found, lent) == ([], 3 * units)


def memory_and_room(spare_bytes: int) -> tuple[list[Any], int, int]:
    """Rows of spare memory after six steps, how many updates were kept in the last, and of how many units."""
    onefold.init()
    life, buffers = Life("split", "", spare_bytes=spare_bytes), []
    for _ in range(6):
        before = life.prepared.kept
        life.backward()
        life.end()
        buffers.append(len(engine_of(life.model).tiers.host.staging.buffers()))
    assert buffers[2:] == buffers[2:3] * 4, "gradients on the host outlive their step"
    rows = [row for row in onefold.memory(life.model).elsewhere if row.state == "spare"]
    return rows, life.prepared.kept - before, len(life.adam.by_unit)


def test_spare_memory_is_bounded_and_reported_and_the_rest_of_the_units_wait_for_step() -> None:
    numels = [WIDTH * WIDTH, 64]  # a bias is padded
    each = 12 * sum(numels)  # bytes: bf16 and its remainder, and two moments
    [(rows, kept, units)] = run_ranks(1, memory_and_room, 2 * each)
    assert sum(row.measured for row in rows) == sum(row.planned for row in rows) == 2 * each
    assert (kept, units) == (4, 6)
    assert run_ranks(1, memory_and_room, 0) == [([], 0, 6)]
